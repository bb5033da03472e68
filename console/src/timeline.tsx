// The strip under a terminal: the life of a session with marks, to look back and to return.
import { useMemo, useRef, useState } from "preact/hooks";
import { clock, clockSpan, oneLine } from "./format.ts";

export type Mark = { time: number; kind: "command" | "prompt" | "failed" | "approval" | "takeover"; text: string };

const SHAPES: Record<Mark["kind"], string> = {
  command: "M-1.5 -7h3v14h-3z",
  failed: "M0 -7l6 12h-12z",
  approval: "M-5 -5h10v10h-10z",
  takeover: "M0 -7l6 7-6 7-6-7z",
  prompt: "M-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0",
};
const NAMES: Record<Mark["kind"], string> = { command: "command", prompt: "prompt", failed: "failed", approval: "approval", takeover: "taken over" };
// Marks nearer than this share of the strip are one: a thousand commands draw no solid bar.
const NEAR = 1 / 400;

// The marks in the order in which they cover each other, without those that the one beside them hides.
function apart(marks: Mark[], near: number): Mark[] {
  const order = { prompt: 0, command: 1, takeover: 2, approval: 3, failed: 4 };
  const shown: Mark[] = [];
  const last: Partial<Record<Mark["kind"], number>> = {};
  for (const mark of [...marks].sort((a, b) => a.time - b.time)) {
    const before = last[mark.kind];
    if (before !== undefined && mark.time - before < near) continue;
    last[mark.kind] = mark.time;
    shown.push(mark);
  }
  return shown.sort((a, b) => order[a.kind] - order[b.kind]);
}

export function Timeline(props: { length: number; at: number; marks: Mark[]; live: boolean; began: number; onSeek: (time: number) => void }) {
  const strip = useRef<SVGSVGElement>(null);
  const [hover, setHover] = useState<{ left: number; text: string }>();
  const length = Math.max(props.length, 0.001);
  const share = (time: number) => Math.min(1, Math.max(0, time / length));
  const timeAt = (event: PointerEvent) => {
    const box = strip.current!.getBoundingClientRect();
    return length * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const near = (time: number) => {
    const found = props.marks.filter((mark) => Math.abs(mark.time - time) < length / 60);
    return found.sort((a, b) => Math.abs(a.time - time) - Math.abs(b.time - time))[0];
  };
  const seek = (event: PointerEvent) => {
    const time = timeAt(event);
    const mark = event.type === "pointerdown" ? near(time) : undefined;
    props.onSeek(mark && Math.abs(mark.time - time) < length / 150 ? mark.time : time);
  };
  const shown = useMemo(() => apart(props.marks, length * NEAR), [props.marks, Math.round(length)]);
  const kinds = (Object.keys(SHAPES) as Mark["kind"][]).filter((kind) => shown.some((mark) => mark.kind === kind));
  return (
    <div class="timeline">
      <svg
        ref={strip}
        height="28"
        role="slider"
        tabindex={0}
        aria-label="Time line of the session"
        aria-valuemin={0}
        aria-valuemax={Math.round(length)}
        aria-valuenow={Math.round(props.at)}
        aria-valuetext={props.live ? "live" : clockSpan(props.at)}
        onPointerDown={(event) => {
          strip.current!.setPointerCapture(event.pointerId);
          seek(event);
        }}
        onPointerMove={(event) => {
          const time = timeAt(event);
          const mark = near(time);
          setHover({ left: share(time), text: mark ? `${clockSpan(mark.time)}  ${oneLine(mark.text, 90)}` : clockSpan(time) });
          if (event.buttons) seek(event);
        }}
        onPointerLeave={() => setHover(undefined)}
        onKeyDown={(event) => {
          const step = { ArrowLeft: -5, ArrowRight: 5, PageUp: -60, PageDown: 60, Home: -length, End: length }[event.key];
          if (!step) return;
          event.preventDefault();
          event.stopPropagation();
          props.onSeek(Math.min(length, Math.max(0, props.at + step)));
        }}
      >
        <rect x="0" y="12" width="100%" height="4" rx="2" class="track" />
        <rect x="0" y="12" width={`${100 * share(props.at)}%`} height="4" rx="2" class={props.live ? "past live" : "past"} />
        {shown.map((mark) => (
          <svg key={`${mark.kind}${mark.time}`} x={`${100 * share(mark.time)}%`} y="14" overflow="visible">
            <path d={SHAPES[mark.kind]} class={`mark ${mark.kind}`} />
          </svg>
        ))}
        <svg x={`${100 * share(props.at)}%`} y="14" overflow="visible">
          <circle r="6" class="head" />
        </svg>
      </svg>
      <div class="span">
        <span>{props.began ? clock(new Date(props.began * 1000).toISOString()) : ""}</span>
        <span class="legend">
          {kinds.map((kind) => (
            <span key={kind}>
              <svg width="12" height="12" viewBox="-8 -8 16 16" aria-hidden="true">
                <path d={SHAPES[kind]} class={`mark ${kind}`} />
              </svg>
              {NAMES[kind]}
            </span>
          ))}
        </span>
        <span>{props.live ? "now" : `+${clockSpan(length)}`}</span>
      </div>
      {hover ? (
        <output class="untrusted" style={{ left: `${100 * hover.left}%` }}>
          {hover.text}
        </output>
      ) : null}
    </div>
  );
}
