// Copies the output of one session into a screen by long polls, from token to token, until the session has ended.

import { fromBase64 } from "./service.js";
import { OVER } from "./view.js";

const WAIT_MS = 25_000; // proxies close connections that are idle for 30 s or more
const SOON_MS = 500; // between two empty reads, so that they cannot become a busy loop
const LONGEST_PAUSE_MS = 15_000;

// `onRead` is called after each read with { state, prompt }, where `prompt` is null if the last output is no prompt and
// undefined without output; or with { trouble }, a transient error. Ends when the session has ended or `signal` aborts;
// throws other errors.
export async function follow(service, sessionId, screen, signal, onRead, pause = sleep) {
  let token = "";
  let failures = 0;
  while (!signal.aborted) {
    const began = Date.now();
    let reply;
    try {
      reply = await service.read(sessionId, token, WAIT_MS, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (!error.transient) throw error;
      onRead({ trouble: error });
      await pause(Math.min(1000 * 2 ** failures++, LONGEST_PAUSE_MS), signal);
      continue;
    }
    if (signal.aborted) return;
    failures = 0;
    const chunks = reply.chunks ?? [];
    const moved = reply.token?.value !== token;
    for (const chunk of chunks) show(screen, chunk);
    token = reply.token?.value || token;
    onRead({ state: reply.state, prompt: chunks.length ? (chunks.at(-1).prompt ?? null) : undefined });
    if (OVER.includes(reply.state) && !moved) return;
    if (!chunks.length && Date.now() - began < SOON_MS) await pause(SOON_MS, signal);
  }
}

export function show(screen, chunk) {
  if (chunk.truncated) {
    screen.forget();
    screen.note(`${chunk.skippedBytes ?? "some"} bytes before this are no longer retained`);
  }
  if (chunk.payload) screen.write(fromBase64(chunk.payload), chunk.stream ?? "");
  if (chunk.exitCode !== undefined) screen.note(`exit code ${chunk.exitCode}`);
}

function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => resolve(clearTimeout(timer)), { once: true });
  });
}
