// Follows the output of one session into a screen by long polls, from token to token, until the session is over.

import { fromBase64 } from "./service.js";
import { OVER } from "./view.js";

const WAIT_MS = 25_000; // proxies cut what is silent for 30 s or more
const SOON_MS = 500; // between two reads that had nothing: none of them may turn into a loop
const LONGEST_PAUSE_MS = 15_000;

// `told` is called after each read: { state, prompt }, where `prompt` is null if something else was printed last and
// undefined if nothing was; or { trouble }, an error that may pass. Ends when the session is over or `signal` aborts;
// throws an error that will not pass.
export async function follow(service, sessionId, screen, signal, told, pause = sleep) {
  let token = "";
  let failures = 0;
  while (!signal.aborted) {
    const began = Date.now();
    let reply;
    try {
      reply = await service.read(sessionId, token, WAIT_MS, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (!error.passing) throw error;
      told({ trouble: error });
      await pause(Math.min(1000 * 2 ** failures++, LONGEST_PAUSE_MS), signal);
      continue;
    }
    if (signal.aborted) return;
    failures = 0;
    const chunks = reply.chunks ?? [];
    const moved = reply.token?.value !== token;
    for (const chunk of chunks) show(screen, chunk);
    token = reply.token?.value || token;
    told({ state: reply.state, prompt: chunks.length ? (chunks.at(-1).prompt ?? null) : undefined });
    if (OVER.includes(reply.state) && !moved) return;
    if (!chunks.length && Date.now() - began < SOON_MS) await pause(SOON_MS, signal);
  }
}

export function show(screen, chunk) {
  if (chunk.truncated) {
    screen.forget();
    screen.note(`${chunk.skippedBytes ?? "some"} bytes before this are no longer kept`);
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
