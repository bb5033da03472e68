// Calls of the session service, and its streams over WebSockets that resume by position.

const API = "/holdfast.session.v1.SessionService/";
// Longer than the service lets any call wait.
const PATIENCE_MS = 90_000;
const TOKEN = "holdfast-token";
// The pause before a stream is opened again: a restarted service is back within seconds.
const RETRY_MS = [300, 1000, 3000];
// Replies that the service sends before this page has handled them.
const WINDOW = 16;

export class ServiceError extends Error {
  constructor(message: string, readonly code = "", readonly reason = "") {
    super(message);
  }
  get words(): string {
    return this.message + (this.reason ? ` (${this.reason})` : "");
  }
  // Whether the same call may succeed soon.
  get transient(): boolean {
    return ["unavailable", "deadline_exceeded"].includes(this.code) && !this.sandboxGone;
  }
  get sandboxGone(): boolean {
    return this.reason === "SANDBOX_GONE";
  }
}

let token = sessionStorage.getItem(TOKEN) ?? "";
export const signedIn = (): boolean => token !== "";

export function signIn(value: string): void {
  token = value;
  sessionStorage.setItem(TOKEN, value);
}

export function signOut(): void {
  token = "";
  sessionStorage.removeItem(TOKEN);
}

// Whether the service answers: what the page shows is otherwise the last known state.
type Watcher = (away: boolean) => void;
const watchers = new Set<Watcher>();
let away = false;

export function onAway(watcher: Watcher): () => void {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function setAway(value: boolean): void {
  if (value === away) return;
  away = value;
  for (const watcher of watchers) watcher(value);
}

export async function call<T>(method: string, fields: object = {}, signal?: AbortSignal): Promise<T> {
  const limit = AbortSignal.timeout(PATIENCE_MS);
  let reply: Response;
  try {
    reply = await fetch(API + method, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(fields),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    setAway(true);
    throw new ServiceError("the service does not answer", "unavailable");
  }
  setAway(false);
  const body = await reply.json().catch(() => null);
  if (reply.ok && body !== null) return body as T;
  throw errorOf(body, reply.status);
}

type ErrorBody = { code?: string; message?: string; details?: { debug?: { reason?: string } }[] };

function errorOf(body: ErrorBody | null, status = 0): ServiceError {
  if (typeof body?.code !== "string") {
    return new ServiceError(`HTTP ${status}, which is not an answer of the service`, status >= 500 ? "unavailable" : "");
  }
  const reason = body.details?.map((each) => each.debug?.reason).find((each) => typeof each === "string");
  return new ServiceError(String(body.message ?? body.code), body.code, reason ?? "");
}

export type StreamState = "connecting" | "live" | "away" | "ended";
export type Stream = { close(): void };

// Opens a stream and keeps it open. `request` is called for each connection, so that it can resume from a position;
// `onReply` returns a promise where a reply takes time to handle, and the service then waits.
export function stream<T>(
  method: string,
  request: () => object,
  onReply: (reply: T) => void | Promise<void>,
  options: { onState?: (state: StreamState) => void; onError?: (error: ServiceError) => void } = {},
): Stream {
  let socket: WebSocket | undefined;
  let timer = 0;
  let closed = false;
  let failures = 0;
  const report = (state: StreamState) => !closed && options.onState?.(state);

  const open = () => {
    report("connecting");
    const made = (socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}${API}${method}`));
    made.binaryType = "arraybuffer";
    let handled = 0;
    let finished = false;
    let answered = false;
    let work: Promise<void> = Promise.resolve();
    made.onopen = () => {
      made.send(JSON.stringify({ authorization: `Bearer ${token}`, request: request(), window: WINDOW, binary: true }));
      failures = 0;
      setAway(false);
      report("live");
    };
    made.onmessage = ({ data }) => {
      const message = decoded<T>(data as string | ArrayBuffer);
      work = work.then(async () => {
        if (closed) return;
        if (message.reply !== undefined) {
          await onReply(message.reply);
          handled += 1;
          if (made.readyState === WebSocket.OPEN) made.send(JSON.stringify({ ack: handled }));
        } else if (message.error) {
          answered = true;
          const error = errorOf(message.error);
          // A service that stops sends `unavailable`; the next connection finds it again.
          if (!error.transient) {
            finished = true;
            options.onError?.(error);
          }
        } else {
          finished = true;
        }
      });
    };
    made.onclose = () => {
      void work.then(() => {
        if (closed || made !== socket) return;
        if (finished) return report("ended");
        report("away");
        // With an error the service has answered, and only the sandbox is out of reach.
        if (!answered) setAway(true);
        timer = window.setTimeout(open, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
      });
    };
  };

  open();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
      socket?.close();
    },
  };
}

type StreamMessage<T> = { reply?: T; error?: ErrorBody; end?: object };

// A binary message is the length of the JSON text in four bytes, that text, and then the output, which becomes `payload`.
function decoded<T>(data: string | ArrayBuffer): StreamMessage<T> {
  if (typeof data === "string") return JSON.parse(data) as StreamMessage<T>;
  const length = new DataView(data).getUint32(0);
  const message = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as { reply: T };
  return { reply: { ...message.reply, payload: new Uint8Array(data, 4 + length) } };
}

export function fromBase64(text: string): Uint8Array {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

export function toBase64(bytes: Uint8Array): string {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary);
}

export const newId = (): string => Array.from(crypto.getRandomValues(new Uint8Array(12)), (each) => each.toString(16).padStart(2, "0")).join("");

// A file of texts, made in the page.
export function download(name: string, type: string, parts: BlobPart[]): void {
  const address = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
