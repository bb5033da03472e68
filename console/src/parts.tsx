// Small parts that several pages show.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { ServiceError } from "./api.ts";
import { clock, oneLine, visible, wholeTime } from "./format.ts";
import type { State } from "./types.ts";

// A state by shape, word and colour; `asks` for a session that waits for an approval.
export function StateMark({ state, approvals = 0 }: { state: State; approvals?: number }) {
  const shown = approvals && state !== "CLOSED" && state !== "ERROR" ? "ASKS" : state;
  const shapes: Record<string, ComponentChildren> = {
    BUSY: <circle cx="6" cy="6" r="4.5" fill="currentColor" />,
    RUNNING: <circle cx="6" cy="6" r="3.75" fill="none" stroke="currentColor" stroke-width="1.5" stroke-dasharray="3 2" />,
    IDLE: <circle cx="6" cy="6" r="3.75" fill="none" stroke="currentColor" stroke-width="1.5" />,
    ASKS: (
      <>
        <circle cx="6" cy="6" r="4.25" fill="none" stroke="currentColor" stroke-width="1.5" />
        <path d="M6 1.5a4.5 4.5 0 0 0 0 9z" fill="currentColor" />
      </>
    ),
    CLOSING: <path d="M2.5 6h7" stroke="currentColor" stroke-width="2" />,
    CLOSED: <rect x="2.5" y="2.5" width="7" height="7" rx="1" fill="none" stroke="currentColor" stroke-width="1.5" />,
    ERROR: <path d="M6 1l5 9.5H1z" fill="currentColor" />,
    UNKNOWN: <path d="M3 6h1M5.5 6h1M8 6h1" stroke="currentColor" stroke-width="2" />,
  };
  return (
    <span class={`state ${shown}`}>
      <svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">
        {shapes[shown] ?? shapes.UNKNOWN}
      </svg>
      {shown}
    </span>
  );
}

export function Time({ at }: { at: string | undefined }) {
  return <time title={wholeTime(at)}>{clock(at)}</time>;
}

// An untrusted text: every character visible, in the order of its characters.
export function Text({ value, lines = false, longest = 300 }: { value: unknown; lines?: boolean; longest?: number }) {
  return <span class="untrusted">{lines ? visible(value) : oneLine(value, longest)}</span>;
}

export function Code({ value, longest = 200 }: { value: unknown; longest?: number }) {
  return (
    <code class="untrusted" title={oneLine(value, 2000)}>
      {oneLine(value, longest)}
    </code>
  );
}

// The rule that decided: its file without the directory, and its line.
export function Rule({ rule }: { rule: string }) {
  return (
    <code class="untrusted" title={oneLine(rule, 500)}>
      {oneLine(rule || "built-in", 500).replace(/^.*\//, "")}
    </code>
  );
}

export function Failure({ error, retry }: { error: ServiceError | undefined; retry?: () => void }) {
  if (!error) return null;
  return (
    <div class={`notice bad ${error.transient ? "transient" : ""}`} role="alert">
      <span class="untrusted">{visible(error.words)}</span>
      {error.transient ? <span class="dim"> Retrying in 3 s.</span> : null}
      {retry ? <button onClick={retry}>Retry now</button> : null}
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <strong>{title}</strong>
      {children}
    </div>
  );
}

// A command line to copy.
export function Copy({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  return (
    <div class="copy">
      <code>{text}</code>
      <button
        type="button"
        onClick={() => navigator.clipboard?.writeText(text).then(() => setDone(true)).catch(() => undefined)}
        title="Copy to the clipboard"
      >
        {done ? "Copied" : "Copy"}
      </button>
    </div>
  );
}

export function Skeleton({ rows = 6 }: { rows?: number }) {
  return (
    <div class="skeleton" aria-busy="true" aria-label="Loading">
      {Array.from({ length: rows }, (_, index) => (
        <div key={index} />
      ))}
    </div>
  );
}

export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    box.current?.showModal();
  }, []);
  return (
    <dialog ref={box} aria-label={title} onClose={onClose} onClick={(event) => event.target === box.current && onClose()}>
      <header>
        <h2>{title}</h2>
        <button class="quiet" onClick={onClose} aria-label="Close this dialog">
          ✕
        </button>
      </header>
      {children}
    </dialog>
  );
}

// A line of small values, as tall as a line of text.
export function Spark({ values, label, width = 64 }: { values: number[]; label: string; width?: number }) {
  if (values.length < 2) return <span class="spark dim">–</span>;
  // Of a core: a fraction of a percent is no peak.
  const top = Math.max(...values, 5);
  const step = width / (values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(15 - (13 * value) / top).toFixed(1)}`);
  return (
    <svg class="spark" width={width} height="16" viewBox={`0 0 ${width} 16`} role="img" aria-label={label}>
      <title>{label}</title>
      <polyline points={`0,16 ${points.join(" ")} ${width},16`} class="area" />
      <polyline points={points.join(" ")} class="line" />
    </svg>
  );
}
