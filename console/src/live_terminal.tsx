// A live terminal: the screen first, then output by position; read-only unless the reader has taken it over.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, newId, ServiceError, stream, toBase64, type StreamState } from "./api.ts";
import { size, visible } from "./format.ts";
import type { Frame, State } from "./types.ts";
import { fittingFont, makeTerminal, takesKey, write, type Screen } from "./xterm.ts";

export type LiveProps = {
  sessionId: string;
  typing: boolean;
  // Whether the terminal takes the size of this page.
  fits: boolean;
  onState: (state: State) => void;
  onStream: (state: StreamState) => void;
  onTitle: (title: string) => void;
  onNotice: (text: string, bad?: boolean) => void;
  // The reader has pressed the key that leaves the terminal.
  onLeave: () => void;
  // The sandbox is gone, and the recording with it.
  onGone: () => void;
};

export function LiveTerminal(props: LiveProps) {
  const place = useRef<HTMLDivElement>(null);
  const screen = useRef<Screen>();
  const latest = useRef(props);
  latest.current = props;
  const [skipped, setSkipped] = useState(0);
  const [gone, setGone] = useState<{ words: string; drawn: boolean }>();

  useEffect(() => {
    const made = (screen.current = makeTerminal({ disableStdin: true, screenReaderMode: false }));
    const { terminal } = made;
    const box = place.current!;
    const fit = () => {
      const font = fittingFont(terminal.cols, terminal.rows, box.clientWidth - 18);
      if (terminal.options.fontSize !== font) terminal.options.fontSize = font;
    };
    made.open(box);
    (box as unknown as { terminal: unknown }).terminal = terminal; // for tests and for the browser's tools
    // Programs get every key, also Tab, but for this one: the way out without a mouse.
    terminal.attachCustomKeyEventHandler((event) => {
      const leaves = latest.current.typing && event.ctrlKey && event.shiftKey && event.code === "KeyL";
      if (leaves) event.preventDefault();
      if (leaves && event.type === "keydown") latest.current.onLeave();
      return !leaves && takesKey(terminal, event);
    });
    let since = "";
    const source = stream<Frame>(
      "StreamTerminal",
      () => ({ sessionId: props.sessionId, ...(since ? { since: { value: since } } : {}) }),
      async (frame) => {
        if (frame.redraw) terminal.reset();
        if (frame.cols && (frame.cols !== terminal.cols || frame.rows !== terminal.rows)) {
          terminal.resize(frame.cols, frame.rows);
          fit();
        }
        const left = Number(frame.skippedBytes);
        if (left) setSkipped((before) => before + left);
        if (frame.payload) await write(terminal, frame.payload);
        since = frame.token.value;
        latest.current.onState(frame.state);
      },
      {
        onState: (state) => latest.current.onStream(state),
        onError: (error) => {
          if (!error.sandboxGone) return latest.current.onNotice(error.words, true);
          setGone({ words: error.words, drawn: since !== "" });
          latest.current.onGone();
        },
      },
    );
    setGone(undefined);
    const sender = new Sender(props.sessionId, (text, bad) => latest.current.onNotice(text, bad));
    terminal.onData((text) => latest.current.typing && sender.add(new TextEncoder().encode(text)));
    terminal.onBinary((text) => latest.current.typing && sender.add(Uint8Array.from(text, (each) => each.charCodeAt(0))));
    terminal.onTitleChange((title) => latest.current.onTitle(title));
    const observer = new ResizeObserver(fit);
    observer.observe(box);
    fit();
    return () => {
      observer.disconnect();
      source.close();
      made.dispose();
    };
  }, [props.sessionId]);

  useEffect(() => {
    const terminal = screen.current?.terminal;
    if (!terminal) return;
    terminal.options.disableStdin = !props.typing;
    terminal.options.cursorBlink = props.typing;
    terminal.textarea!.tabIndex = props.typing ? 0 : -1;
    if (props.typing) terminal.focus();
    else terminal.blur();
  }, [props.typing]);

  useEffect(() => {
    if (!props.fits || !props.typing) return;
    const box = place.current!;
    const cols = Math.max(20, Math.min(500, Math.floor((box.clientWidth - 18) / (13 * 0.6025))));
    const rows = Math.max(8, Math.min(200, Math.floor(Math.max(320, innerHeight - box.getBoundingClientRect().top - 190) / 17)));
    call("SendInput", { sessionId: props.sessionId, actions: [{ type: "RESIZE", cols, rows }] }).catch(
      (error) => error instanceof ServiceError && props.onNotice(error.words, true),
    );
  }, [props.fits, props.typing]);

  return (
    <div class={`terminal-box ${props.typing ? "typing" : ""} ${gone && !gone.drawn ? "gone" : ""}`}>
      <div ref={place} class="terminal-place" data-testid="terminal" hidden={gone && !gone.drawn} />
      {gone && !gone.drawn ? (
        <>
          <p>
            <strong>The sandbox of this session is gone,</strong> and its screen and recording with it. The audit log still has the commands.
          </p>
          <p class="dim untrusted">{visible(gone.words)}</p>
        </>
      ) : null}
      {gone?.drawn ? (
        <div class="terminal-note" role="status">
          The sandbox is gone: this is its last screen
        </div>
      ) : null}
      {skipped ? (
        <div class="terminal-note" role="status">
          {size(skipped)} of output were skipped: this page was behind
        </div>
      ) : null}
    </div>
  );
}

// Sends typed bytes in their order: one call at a time, and all keys of the meantime with the next.
class Sender {
  private waiting: Uint8Array[] = [];
  private busy = false;

  constructor(private sessionId: string, private notice: (text: string, bad?: boolean) => void) {}

  add(bytes: Uint8Array): void {
    this.waiting.push(bytes);
    if (!this.busy) void this.send();
  }

  private async send(): Promise<void> {
    this.busy = true;
    while (this.waiting.length) {
      const data = joined(this.waiting.splice(0));
      const fields = { sessionId: this.sessionId, data: toBase64(data), requestId: newId() };
      try {
        const reply = await this.once(fields);
        if (!reply.accepted) this.notice(`The input waits for an approval (${reply.approvalId}).`);
      } catch (error) {
        this.waiting = [];
        this.notice(error instanceof ServiceError ? error.words : String(error), true);
      }
    }
    this.busy = false;
  }

  // Once more if the answer was lost: the request id makes it one input.
  private async once(fields: object): Promise<{ accepted: boolean; approvalId: string }> {
    try {
      return await call("SendInput", fields);
    } catch (error) {
      if (!(error instanceof ServiceError) || error.code !== "unavailable") throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000));
      return call("SendInput", fields);
    }
  }
}

function joined(parts: Uint8Array[]): Uint8Array {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
