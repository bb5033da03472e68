// Charts of usage over time, drawn as SVG.
import { useState } from "preact/hooks";
import { clock } from "./format.ts";

export type Point = { at: number; value: number };

// The next of 1, 2, 2.5, 5 times a power of ten, so that the top line has a short number.
function nice(value: number): number {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value)!;
}

export function Chart(props: { title: string; points: Point[]; words: (value: number) => string; height?: number; floor?: number }) {
  const [hover, setHover] = useState<number>();
  const { points, words, height = 120 } = props;
  const last = points.at(-1);
  const top = nice(Math.max(props.floor ?? 1, ...points.map((each) => each.value)));
  const [begin, end] = [points[0]?.at ?? 0, last?.at ?? 1];
  const x = (at: number) => (600 * (at - begin)) / Math.max(1e-6, end - begin);
  const y = (value: number) => height - (height * value) / top;
  const line = points.map((each) => `${x(each.at).toFixed(1)},${y(each.value).toFixed(1)}`).join(" ");
  const chosen = hover === undefined ? undefined : points.reduce((best, each) => (Math.abs(x(each.at) - hover) < Math.abs(x(best.at) - hover) ? each : best), points[0]!);
  return (
    <figure class="chart">
      <figcaption>
        <span>{props.title}</span>
        <strong>{chosen ? `${words(chosen.value)} at ${clock(new Date(chosen.at * 1000).toISOString())}` : last ? words(last.value) : "–"}</strong>
      </figcaption>
      {points.length > 1 ? (
        <div class="plot">
        <span class="top">{words(top)}</span>
        <svg
          viewBox={`0 0 600 ${height}`}
          preserveAspectRatio="none"
          role="img"
          aria-label={`${props.title}: now ${words(last!.value)}, at most ${words(Math.max(...points.map((each) => each.value)))}`}
          onPointerMove={(event) => {
            const box = event.currentTarget.getBoundingClientRect();
            setHover((600 * (event.clientX - box.left)) / box.width);
          }}
          onPointerLeave={() => setHover(undefined)}
        >
          {[0, 0.5, 1].map((part) => (
            <line key={part} x1="0" x2="600" y1={height * part} y2={height * part} class="grid" vector-effect="non-scaling-stroke" />
          ))}
          <polygon points={`0,${height} ${line} 600,${height}`} class="area" />
          <polyline points={line} class="line" vector-effect="non-scaling-stroke" />
          {chosen ? <line x1={x(chosen.at)} x2={x(chosen.at)} y1="0" y2={height} class="cursor" vector-effect="non-scaling-stroke" /> : null}
        </svg>
        </div>
      ) : (
        <p class="dim">No samples yet: the monitor takes one every few seconds.</p>
      )}
      {points.length > 1 ? (
        <div class="axis">
          <span>{clock(new Date(begin * 1000).toISOString())}</span>
          <span>{clock(new Date(end * 1000).toISOString())}</span>
        </div>
      ) : null}
    </figure>
  );
}

// Bytes a second between samples of a count.
export function rates(points: Point[]): Point[] {
  return points.slice(1).map((each, index) => {
    const before = points[index]!;
    return { at: each.at, value: Math.max(0, each.value - before.value) / Math.max(0.001, each.at - before.at) };
  });
}
