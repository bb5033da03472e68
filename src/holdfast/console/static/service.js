// Calls of the session service, in JSON over HTTP, and their errors as texts.

const API = "holdfast.session.v1.SessionService/";
// Longer than the service lets any call wait (a long poll, input that is not read, a close).
const PATIENCE_MS = 90_000;

export class ServiceError extends Error {
  // `code` is the status in lower case, `reason` the stable identifier, `retryAfter` in seconds or null.
  constructor(message, { code = "", reason = "", retryAfter = null } = {}) {
    super(message);
    this.name = "ServiceError";
    Object.assign(this, { code, reason, retryAfter });
  }

  // Whether the same call may succeed soon.
  get transient() {
    return ["unavailable", "resource_exhausted", "deadline_exceeded"].includes(this.code);
  }

  get words() {
    const again = this.retryAfter === null ? "" : `; try again in ${this.retryAfter} s`;
    return this.message + again + (this.reason ? ` (${this.reason})` : "");
  }
}

export class Service {
  // `base` is the URL of the page: the service may be behind a proxy, under a path of its own.
  constructor(token, base) {
    this.token = token;
    this.base = base;
  }

  // One call; an abort by `signal` is an AbortError, every other failure a ServiceError.
  async call(method, fields = {}, signal = undefined) {
    const abort = new AbortController();
    const stop = () => abort.abort();
    signal?.addEventListener("abort", stop);
    if (signal?.aborted) stop();
    const timer = setTimeout(stop, PATIENCE_MS);
    try {
      const reply = await fetch(new URL(API + method, this.base), {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: `Bearer ${this.token}` },
        body: JSON.stringify(fields),
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
        signal: abort.signal,
      });
      return await answer(reply);
    } catch (error) {
      if (signal?.aborted) throw abort.signal.reason;
      if (error instanceof ServiceError) throw error;
      const why = abort.signal.aborted ? `no answer within ${PATIENCE_MS / 1000} s` : "it is unreachable";
      throw new ServiceError(`the service does not answer: ${why}`, { code: "unavailable" });
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", stop);
    }
  }

  // Sends text and control actions, once more if the answer was lost: the request id makes it idempotent.
  async send(sessionId, { text = "", actions = [] }) {
    const fields = { sessionId, data: toBase64(text), actions: actions.map((type) => ({ type })), requestId: newId() };
    try {
      return await this.call("SendInput", fields);
    } catch (error) {
      if (error.code !== "unavailable") throw error;
      return this.call("SendInput", fields);
    }
  }

  read(sessionId, since, waitTimeoutMs, signal) {
    const fields = { sessionId, maxBytes: 1024 * 1024, waitTimeoutMs };
    return this.call("ReadOutput", since ? { ...fields, since: { value: since } } : fields, signal);
  }
}

async function answer(reply) {
  let body;
  try {
    body = await reply.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    body = null;
  }
  if (reply.ok && body !== null) return body;
  if (typeof body?.code !== "string") {
    const code = reply.status >= 500 ? "unavailable" : "unknown";
    throw new ServiceError(`HTTP ${reply.status}, which is not an answer of the service`, { code });
  }
  const details = (Array.isArray(body.details) ? body.details : []).map((each) => each?.debug ?? {});
  const delay = parseFloat(details.find((each) => each.retryDelay)?.retryDelay);
  throw new ServiceError(body.message || body.code, {
    code: body.code,
    reason: details.find((each) => each.reason)?.reason ?? "",
    retryAfter: Number.isFinite(delay) ? delay : null,
  });
}

export function toBase64(text) {
  let binary = "";
  for (const byte of new TextEncoder().encode(text)) binary += String.fromCharCode(byte);
  return btoa(binary);
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text ?? ""), (character) => character.charCodeAt(0));
}

// Not `randomUUID`, which pages without TLS do not have.
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
