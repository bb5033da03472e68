// The audit log in words, with filters, its verification and an export.
import { useState } from "preact/hooks";
import { call, download, ServiceError } from "../api.ts";
import { bodyOf, Words, type Ran } from "../audit_words.tsx";
import { clock, oneLine, plural, visible } from "../format.ts";
import { useLoad } from "../hooks.ts";
import { Empty, Failure, Skeleton, Text, Time } from "../parts.tsx";
import { go, Link, sessionPath, usePlace, withQuery } from "../router.tsx";
import type { AuditRecord, Caller } from "../types.ts";

type Page = { records: AuditRecord[]; nextPageToken: string };
type Verified = { holds: boolean; rows: string; sessions: string; breaks: string[]; verifiedAt: string; headSeq: string; headHash: string };

// Without bookkeeping of the log and without events, which repeat what these rows say.
export const ACTIONS = [
  ...["session_created", "session_closed", "error", "sandbox_made", "sandbox_ending", "sandbox_removed", "takeover", "release"],
  ...["input", "control", "command", "command_ended", "decision", "approval_answered", "model_call"],
];
const KINDS: Record<string, string[]> = {
  "": ACTIONS,
  commands: ["command", "command_ended", "command_started"],
  typed: ["input", "control", "takeover", "release"],
  decisions: ["decision", "approval_answered"],
  models: ["model_call"],
  sessions: ["session_created", "close", "session_closed", "error", "sandbox_made", "sandbox_ending", "sandbox_removed"],
  events: ["event"],
  everything: [],
};
const MOST_EXPORTED = 100_000;

export function Audit({ caller }: { caller: Caller }) {
  const place = usePlace();
  const get = (name: string) => place.query.get(name) ?? "";
  const fields = {
    sessionId: get("session"),
    agentId: get("agent"),
    kinds: KINDS[get("kind")] ?? [],
    contains: get("q"),
    newestFirst: true,
    ...(get("day") ? { since: new Date(`${get("day")}T00:00:00`).toISOString(), until: new Date(`${get("day")}T23:59:59.999`).toISOString() } : {}),
  };
  const key = JSON.stringify([fields, get("page")]);
  const found = useLoad<Page>(key, (signal) => call("ListAudit", { ...fields, pageSize: 200, pageToken: get("page") }, signal));
  const all = found.value?.records ?? [];
  const records = get("kind") ? all : withoutStarts(all);
  const commands = commandTexts(all);
  const set = (changes: Record<string, string>) => go(withQuery(place, { ...changes, page: "" }), { replace: true });
  return (
    <main>
      <div class="page-head">
        <h1 class="page">Audit</h1>
        <Verification sessionId={fields.sessionId} caller={caller} />
        <span class="grow" />
        <Export fields={fields} />
      </div>
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <input type="search" aria-label="Contains" placeholder="Contains" defaultValue={get("q")} onChange={(event) => set({ q: event.currentTarget.value })} />
        <select aria-label="Kind" value={get("kind")} onChange={(event) => set({ kind: event.currentTarget.value })}>
          {Object.keys(KINDS).map((each) => (
            <option key={each} value={each}>
              {each || "actions"}
            </option>
          ))}
        </select>
        {caller.role === "operator" ? <input aria-label="Agent" placeholder="Agent" size={14} defaultValue={get("agent")} onChange={(event) => set({ agent: event.currentTarget.value.trim() })} /> : null}
        <input aria-label="Session" placeholder="Session" size={14} defaultValue={get("session")} onChange={(event) => set({ session: event.currentTarget.value.trim() })} />
        <input aria-label="Day" type="date" value={get("day")} onChange={(event) => set({ day: event.currentTarget.value })} />
      </form>
      <Failure error={found.error} retry={found.reload} />
      {!found.value && found.loading ? <Skeleton rows={10} /> : null}
      {found.value && !records.length ? <Empty title="No row matches" /> : null}
      {records.length ? <AuditTable records={records} commands={commands} sessions /> : null}
      <nav class="pager" aria-label="Pages">
        {get("page") ? <Link to={withQuery(place, { page: "" })}>Newest</Link> : null}
        {found.value?.nextPageToken ? <Link to={withQuery(place, { page: found.value.nextPageToken })}>Older →</Link> : null}
      </nav>
    </main>
  );
}

export function commandTexts(records: AuditRecord[]): Map<string, Ran> {
  const texts = new Map<string, Ran>();
  for (const record of records) {
    const { text, by } = bodyOf(record);
    if (["command", "input"].includes(record.kind) && typeof text === "string" && text.trim()) texts.set(record.commandId, { text: text.trim(), by: String(by ?? "") });
  }
  return texts;
}

// The end of a command has its text, exit code and duration, so its first row is left out.
export function withoutStarts(records: AuditRecord[]): AuditRecord[] {
  const ended = new Set(records.filter((each) => each.kind === "command_ended").map((each) => each.commandId));
  return records.filter((each) => each.kind !== "command" || !ended.has(each.commandId));
}

export function AuditTable({ records, commands, sessions = false }: { records: AuditRecord[]; commands: Map<string, Ran>; sessions?: boolean }) {
  return (
    <table class="audit">
      {sessions ? (
        <thead>
          <tr>
            <th>Time</th>
            <th class="audit-session">Session</th>
            <th>Event</th>
            <th class="number">Row</th>
          </tr>
        </thead>
      ) : null}
      <tbody>
        {records.map((record) => (
          <tr key={`${record.sessionId} ${record.seq}`} class={record.kind}>
            <td class="nowrap dim">
              <Time at={record.at} />
            </td>
            {sessions ? (
              <td class="nowrap audit-session">
                {record.sessionId ? (
                  <Link to={sessionPath(record.sessionId)}>
                    <code>{oneLine(record.sessionId, 12)}</code>
                  </Link>
                ) : (
                  <span class="dim">service</span>
                )}
              </td>
            ) : null}
            <td class="words">
              <Words record={record} commands={commands} />
            </td>
            <td class="number dim" title={`row ${oneLine(record.seq, 20)}, hash ${oneLine(record.hash, 80)}`}>
              {oneLine(record.seq, 12)}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Verification({ sessionId, caller }: { sessionId: string; caller: Caller }) {
  const allowed = caller.role === "operator" || sessionId !== "";
  const found = useLoad<Verified | undefined>(`verify ${sessionId} ${allowed}`, async (signal) => (allowed ? call<Verified>("VerifyAudit", { sessionId }, signal) : undefined));
  if (!allowed) return <span class="dim">An operator verifies the whole log; choose a session to verify yours.</span>;
  if (found.error) return <span class="verify bad untrusted">not verified: {visible(found.error.words)}</span>;
  if (!found.value) return <span class="verify dim">verifying…</span>;
  const { holds, rows, sessions, breaks, verifiedAt, headSeq, headHash } = found.value;
  return (
    <details class={`verify ${holds ? "ok" : "bad"}`}>
      <summary>{holds ? `✓ the chain holds: ${plural(Number(rows), "row")} of ${plural(Number(sessions), "session")}` : `✗ ${plural(breaks.length, "finding")}`}</summary>
      <p class="dim">
        verified at {clock(verifiedAt)}; head {oneLine(headSeq, 20)} <code>{oneLine(headHash, 16)}</code>{" "}
        <button class="quiet" onClick={found.reload}>
          Verify again
        </button>
      </p>
      <ul>
        {breaks.map((each) => (
          <li key={each}>
            <Text value={each} />
          </li>
        ))}
      </ul>
    </details>
  );
}

function Export({ fields }: { fields: object }) {
  const [words, setWords] = useState("Export");
  const run = async () => {
    const lines: string[] = [];
    let pageToken = "";
    try {
      do {
        const page: Page = await call("ListAudit", { ...fields, pageSize: 1000, pageToken });
        for (const record of page.records) lines.push(JSON.stringify(record) + "\n");
        pageToken = page.nextPageToken;
        setWords(`${lines.length} rows…`);
      } while (pageToken && lines.length < MOST_EXPORTED);
      download("audit.jsonl", "application/x-ndjson", lines);
      setWords(pageToken ? `Exported the latest ${lines.length} rows` : `Exported ${plural(lines.length, "row")}`);
    } catch (error) {
      setWords(error instanceof ServiceError ? error.words : String(error));
    }
  };
  return (
    <button type="button" onClick={() => void run()}>
      {words}
    </button>
  );
}
