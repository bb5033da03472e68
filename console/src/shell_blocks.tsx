// A shell session as blocks: each command with its output, its exit code and its duration, and a line to run one.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, newId, ServiceError, stream } from "./api.ts";
import { duration, oneLine, plainOutput, secondsOf, size, visible } from "./format.ts";
import { useNow } from "./hooks.ts";
import { Time } from "./parts.tsx";
import type { Caller, Chunk, Command } from "./types.ts";

// The output of one command that the page keeps, and the commands with output: the rest is in the recording.
const MOST_TEXT = 64 * 1024;
const MOST_BLOCKS = 100;

// How long chunks are taken in without a pause: half a frame at 60 Hz.
const BUSY_MS = 8;

type Piece = { stream: string; text: string };
type Output = { pieces: Piece[]; length: number; skipped: number };

export type ShellProps = {
  sessionId: string;
  commands: Command[];
  caller: Caller;
  over: boolean;
  // Whether the sandbox is gone, and the recording with it.
  gone: boolean;
  onNotice: (text: string, bad?: boolean) => void;
  onGone: () => void;
};

export function ShellBlocks(props: ShellProps) {
  const [outputs, setOutputs] = useState<Map<string, Output>>(new Map());
  const pending = useRef<Map<string, Output>>(new Map());
  const end = useRef<HTMLDivElement>(null);
  const now = useNow();
  useEffect(() => {
    let since = "";
    let frame = 0;
    let paused = performance.now();
    const decoders = new Map<string, TextDecoder>();
    pending.current = new Map();
    const source = stream<Chunk>(
      "StreamOutput",
      () => ({ sessionId: props.sessionId, ...(since ? { since: { value: since } } : {}) }),
      async (chunk) => {
        since = chunk.token.value;
        const key = `${chunk.commandId} ${chunk.stream}`;
        const decoder = decoders.get(key) ?? new TextDecoder();
        decoders.set(key, decoder);
        const before = pending.current.get(chunk.commandId) ?? { pieces: [], length: 0, skipped: 0 };
        const text = chunk.payload ? decoder.decode(chunk.payload, { stream: true }) : "";
        pending.current.set(chunk.commandId, added(before, chunk.stream, text, Number(chunk.skippedBytes)));
        if (pending.current.size > MOST_BLOCKS) pending.current.delete(pending.current.keys().next().value!);
        if (!frame) {
          frame = requestAnimationFrame(() => {
            frame = 0;
            setOutputs(new Map(pending.current));
          });
        }
        // A flood of output leaves time for the page to draw. Not after each chunk: browsers delay a timer by 4 ms.
        if (performance.now() - paused > BUSY_MS) {
          await new Promise((resolve) => setTimeout(resolve, 0));
          paused = performance.now();
        }
      },
      { onError: (error) => (error.sandboxGone ? props.onGone() : props.onNotice(error.words, true)) },
    );
    return () => {
      cancelAnimationFrame(frame);
      source.close();
    };
  }, [props.sessionId]);
  const shown = props.commands.slice(0, MOST_BLOCKS).reverse();
  const last = shown.at(-1)?.commandId;
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [last]);
  return (
    <div class="blocks">
      <div class="blocks-scroll">
        {props.gone ? <p class="asks">The sandbox of this session is gone. The audit log keeps the commands and the beginnings of their outputs.</p> : null}
        {!shown.length ? <p class="dim">No command ran yet.</p> : null}
        {shown.map((each) => {
          const output = outputs.get(each.commandId);
          const running = !each.endedAt;
          const pieces = output?.pieces.length ? output.pieces : undefined;
          // The sandbox keeps the output of the latest commands, and the audit log the beginning of each.
          const whole = !pieces && new TextEncoder().encode(each.excerpt).length >= Number(each.outputBytes);
          return (
            <article key={each.commandId} class={`block ${each.exitCode ? "failed-row" : ""}`}>
              <header>
                <code class="untrusted">{visible(each.text.slice(0, 4000))}</code>
                <span class={running ? "busy" : each.exitCode ? "failed" : "ok"}>{running ? "● runs" : each.exitCode === undefined ? "no exit code" : each.exitCode ? `✗ exit ${each.exitCode}` : "✓"}</span>
                <span class="dim number">{duration(running ? now / 1000 - secondsOf(each.startedAt) : each.durationSeconds)}</span>
                <span class="dim number">{running ? "" : size(each.outputBytes)}</span>
                <span class="dim">
                  <Time at={each.startedAt} />
                </span>
              </header>
              {output?.skipped && !whole ? <p class="asks">{size(output.skipped)} are no longer kept{pieces || !each.excerpt ? "" : "; this is the beginning in the audit log"}</p> : null}
              {pieces ? (
                <pre class="untrusted">
                  {pieces.map((piece, index) => (
                    <span key={index} class={piece.stream === "stderr" ? "stderr" : ""}>
                      {visible(plainOutput(piece.text))}
                    </span>
                  ))}
                </pre>
              ) : each.excerpt ? (
                <pre class="untrusted">{visible(plainOutput(each.excerpt))}</pre>
              ) : null}
            </article>
          );
        })}
        <div ref={end} />
      </div>
      {!props.over ? <RunLine sessionId={props.sessionId} onNotice={props.onNotice} /> : null}
    </div>
  );
}

function added(before: Output, stream: string, text: string, skipped: number): Output {
  const pieces = [...before.pieces];
  const last = pieces.at(-1);
  if (text) {
    if (last?.stream === stream) pieces[pieces.length - 1] = { stream, text: last.text + text };
    else pieces.push({ stream, text });
  }
  let length = before.length + text.length;
  // The latest are kept.
  while (length > MOST_TEXT && pieces.length) {
    const first = pieces[0]!;
    const cut = Math.min(first.text.length, length - MOST_TEXT);
    length -= cut;
    skipped += cut;
    if (cut === first.text.length) pieces.shift();
    else pieces[0] = { stream: first.stream, text: first.text.slice(cut) };
  }
  return { pieces, length, skipped: before.skipped + skipped };
}

function RunLine({ sessionId, onNotice }: { sessionId: string; onNotice: (text: string, bad?: boolean) => void }) {
  const [text, setText] = useState("");
  const run = async (event: Event) => {
    event.preventDefault();
    const command = text;
    if (!command.trim()) return;
    setText("");
    try {
      const data = btoa(Array.from(new TextEncoder().encode(`${command}\n`), (byte) => String.fromCharCode(byte)).join(""));
      const reply = await call<{ accepted: boolean; approvalId: string }>("SendInput", { sessionId, data, requestId: newId() });
      if (!reply.accepted) onNotice(`${oneLine(command, 80)} waits for an approval (${reply.approvalId}).`);
    } catch (error) {
      onNotice(error instanceof ServiceError ? error.words : String(error), true);
      setText(command);
    }
  };
  return (
    <form class="run-line" onSubmit={(event) => void run(event)}>
      <input value={text} onInput={(event) => setText(event.currentTarget.value)} placeholder="Run a command here: recorded under your name" aria-label="Command" autocomplete="off" spellcheck={false} />
      <button class="primary">Run</button>
      <button type="button" onClick={() => void call("SendInput", { sessionId, actions: [{ type: "CTRL_C" }] }).catch((error) => onNotice(String(error.words ?? error), true))}>
        Ctrl-C
      </button>
    </form>
  );
}
