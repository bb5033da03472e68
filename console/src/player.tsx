// Plays the recording of a session: seek, speed, and pauses that are cut short.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, download, fromBase64, ServiceError } from "./api.ts";
import { visible } from "./format.ts";
import type { Token } from "./types.ts";
import { fittingFont, makeTerminal, write, type Screen } from "./xterm.ts";

type WireEvent = { time: number; code: string; data: string };
type Part = { events: WireEvent[]; token: Token; more: boolean; startedAt: string; cols: number; rows: number };
export type Recorded = { time: number; code: string; data: Uint8Array };
export type Recording = { events: Recorded[]; startedAt: string; cols: number; rows: number; cut: boolean };

// More than the output that a sandbox retains of one session by default.
const MOST_BYTES = 64 * 1024 * 1024;

export async function loadRecording(sessionId: string, signal: AbortSignal, onProgress: (bytes: number) => void): Promise<Recording> {
  const events: Recorded[] = [];
  let since = "";
  let bytes = 0;
  for (;;) {
    const part: Part = await call("ReadRecording", { sessionId, ...(since ? { since: { value: since } } : {}) }, signal);
    for (const { time, code, data } of part.events) {
      const decoded = fromBase64(data);
      bytes += decoded.length;
      events.push({ time, code, data: decoded });
    }
    onProgress(bytes);
    since = part.token.value;
    if (!part.more || bytes > MOST_BYTES) {
      const opening = events.find((each) => each.code === "r");
      const [cols, rows] = opening ? sizeOf(opening) : [part.cols, part.rows];
      return { events, startedAt: part.startedAt, cols, rows, cut: part.more };
    }
  }
}

function sizeOf(event: Recorded): [number, number] {
  const [cols, rows] = new TextDecoder().decode(event.data).split("x").map(Number);
  return [cols || 80, rows || 24];
}

// As asciicast v2.
export function saveCast(sessionId: string, recording: Recording): void {
  const header = { version: 2, width: recording.cols, height: recording.rows, timestamp: Math.floor(Date.parse(recording.startedAt) / 1000), title: sessionId };
  const decoder = new TextDecoder("utf-8");
  const lines = recording.events.flatMap(({ time, code, data }) => {
    const text = code === "o" ? decoder.decode(data, { stream: true }) : new TextDecoder().decode(data);
    return text ? [JSON.stringify([Number(time.toFixed(6)), code, text]) + "\n"] : [];
  });
  download(`${sessionId}.cast`, "application/x-asciicast", [JSON.stringify(header) + "\n", ...lines]);
}

export type PlayerProps = {
  recording: Recording;
  at: number;
  playing: boolean;
  speed: number;
  onTime: (time: number) => void;
  onEnd: () => void;
};

// Bytes between two frames of the browser, so that a long seek does not block the page.
const STEP_BYTES = 1024 * 1024;

export function Player(props: PlayerProps) {
  const place = useRef<HTMLDivElement>(null);
  const engine = useRef<Engine>();
  const latest = useRef(props);
  latest.current = props;
  const [problem, setProblem] = useState("");

  useEffect(() => {
    const made = (engine.current = new Engine(props.recording, place.current!));
    return () => made.dispose();
  }, [props.recording]);

  useEffect(() => {
    engine.current?.seek(props.at).catch((error) => setProblem(error instanceof ServiceError ? error.words : String(error)));
  }, [props.at, props.recording]);

  useEffect(() => {
    if (!props.playing) return;
    let last = performance.now();
    let frame = requestAnimationFrame(function tick(now) {
      const { recording, onTime, onEnd, speed } = latest.current;
      const current = engine.current!;
      const next = current.nextTime();
      let time = current.time + ((now - last) / 1000) * speed;
      // A pause of more than two seconds is cut.
      if (next !== undefined && next - time > 2) time = next - 2;
      last = now;
      const end = recording.events.at(-1)?.time ?? 0;
      void current.seek(Math.min(time, end));
      onTime(Math.min(time, end));
      if (time >= end) return onEnd();
      frame = requestAnimationFrame(tick);
    });
    return () => cancelAnimationFrame(frame);
  }, [props.playing, props.recording]);

  return (
    <div class="terminal-box">
      <div ref={place} class="terminal-place" data-testid="player" />
      {problem ? <div class="terminal-note">{visible(problem)}</div> : null}
    </div>
  );
}

class Engine {
  time = -1;
  private index = 0;
  private screen: Screen;
  private wanted = 0;
  private running: Promise<void> | undefined;
  private observer: ResizeObserver;

  constructor(private recording: Recording, box: HTMLElement) {
    this.screen = makeTerminal({ disableStdin: true, cols: recording.cols, rows: recording.rows, scrollback: 1000 });
    const { terminal } = this.screen;
    this.screen.open(box);
    (box as unknown as { terminal: unknown }).terminal = terminal;
    const fit = () => (terminal.options.fontSize = fittingFont(terminal.cols, terminal.rows, box.clientWidth - 18));
    this.observer = new ResizeObserver(fit);
    this.observer.observe(box);
    terminal.onResize(fit);
    fit();
  }

  nextTime(): number | undefined {
    return this.recording.events[this.index]?.time;
  }

  seek(time: number): Promise<void> {
    this.wanted = time;
    this.running ??= this.run().finally(() => (this.running = undefined));
    return this.running;
  }

  private async run(): Promise<void> {
    const { terminal } = this.screen;
    while (this.time !== this.wanted) {
      const target = this.wanted;
      if (target < this.time) {
        terminal.reset();
        terminal.resize(this.recording.cols, this.recording.rows);
        this.index = 0;
      }
      this.time = target;
      let bytes = 0;
      for (; this.index < this.recording.events.length && this.wanted >= target; this.index++) {
        const event = this.recording.events[this.index]!;
        if (event.time > target) break;
        if (event.code === "r") terminal.resize(...sizeOf(event));
        else if (event.code === "o") {
          bytes += event.data.length;
          if (bytes > STEP_BYTES) {
            await write(terminal, event.data);
            bytes = 0;
          } else terminal.write(event.data);
        }
      }
      await write(terminal, "");
    }
  }

  dispose(): void {
    this.observer.disconnect();
    this.screen.dispose();
  }
}
