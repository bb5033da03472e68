// Rows of the audit log in words: "builder ran `make test`, exit 2 after 3.1 s, 14 KB".
import type { ComponentChildren } from "preact";
import { count, duration, endWords, money, oneLine, size } from "./format.ts";
import { Code, Rule, Text } from "./parts.tsx";
import type { AuditRecord } from "./types.ts";

type Body = Record<string, unknown>;

export function bodyOf(record: AuditRecord): Body {
  try {
    const body: unknown = JSON.parse(record.body);
    return body && typeof body === "object" ? (body as Body) : { detail: record.body };
  } catch {
    return { detail: record.body };
  }
}

export type Ran = { text: string; by: string };

// `commands` has the commands by their id, from the rows around.
export function Words({ record, commands }: { record: AuditRecord; commands: Map<string, Ran> }) {
  const body = bodyOf(record);
  const agent = <b><Text value={body.by || record.agentId || "the service"} longest={40} /></b>;
  const command = (text: unknown) => <Code value={text} longest={160} />;
  const named = () => {
    const found = commands.get(record.commandId);
    return found ? command(found.text) : "a command";
  };
  const runner = <b><Text value={commands.get(record.commandId)?.by || record.agentId} longest={40} /></b>;
  const because = body.reason ? <span class="dim"> — {oneLine(body.reason, 200)}</span> : null;
  const rule = body.rule && body.rule !== "built-in" ? <span class="dim"> · <Rule rule={String(body.rule)} /></span> : null;
  const said: Record<string, () => ComponentChildren> = {
    session_created: () => <>{agent} opened a {oneLine(body.kind, 20)} in {oneLine(body.sandbox, 60)} with the profile {oneLine(body.profile, 40)}</>,
    session_closed: () => <>the session ended: {endWords(oneLine(body.summary || body.reason, 300))}</>,
    input: () => body.hidden ? <>{agent} typed {String(body.bytes)} hidden bytes</> : <>{agent} typed {command(String(body.text ?? "").replace(/[\r\n]+$/, ""))}</>,
    command: () => <>{agent} runs {command(body.text)}{rule}</>,
    command_started: () => <>{named()} started</>,
    command_ended: () => (
      <>
        {runner} ran {named()},{" "}
        {body.exit_code === 0 ? <span class="ok">exit 0</span> : <span class="failed">{body.exit_code === null || body.exit_code === undefined ? "no exit code" : `exit ${Number(body.exit_code)}`}</span>}
        {body.duration !== undefined ? ` after ${duration(Number(body.duration))}` : ""}, {size(Number(body.output_bytes ?? 0))}
      </>
    ),
    control: () => <>{agent} sent {oneLine(body.action, 20)}{body.cols ? ` ${Number(body.cols)}×${Number(body.rows)}` : ""}</>,
    decision: () => (
      <>
        the rules {body.verdict === "deny" ? <span class="failed">refused</span> : body.verdict === "ask" ? <span class="asks">held back</span> : "allowed"} {command(body.command)}{because}{rule}
      </>
    ),
    approval_answered: () => (
      <>
        {["approved", "refused"].includes(String(body.outcome)) ? <>{agent} <span class={body.outcome === "approved" ? "ok" : "failed"}>{String(body.outcome)}</span> {command(body.command)}</> : <>the approval of {command(body.command)} was {body.outcome === "expired" ? "not answered in time" : oneLine(body.outcome, 20)}</>}
        {body.comment ? <span class="dim"> — {oneLine(body.comment, 200)}</span> : null}
      </>
    ),
    model_call: () => (
      <>
        {agent} called <code>{oneLine(body.model, 60)}</code>, {Number(body.status) >= 200 && Number(body.status) < 300 ? "" : <span class="failed">status {Number(body.status)}, </span>}
        {count(Number(body.input_tokens ?? 0))} tokens in, {count(Number(body.output_tokens ?? 0))} out{body.money ? `, cost ${money(Number(body.money))}` : ""}, {duration(Number(body.duration_seconds ?? 0))}
      </>
    ),
    takeover: () => <>{agent} took the session over{rule}</>,
    release: () => <>{agent} released the session</>,
    error: () => <><span class="failed">error</span>: {oneLine(body.detail, 300)}{because}</>,
    event: () => <>{oneLine(String(body.type ?? "event").toLowerCase().replaceAll("_", " "), 40)}: {oneLine(body.detail, 300)}</>,
    close: () => <>{agent} closed the session{body.mode === "force" ? " by force" : ""}</>,
    stream_opened: () => <>the log of <code>{oneLine(body.session_id, 40)}</code> was begun</>,
    stream_marked: () => <>the log of <code>{oneLine(body.session_id, 40)}</code> was marked at row {oneLine(body.seq, 12)}</>,
    sandbox_made: () => <>the sandbox {oneLine(body.sandbox, 80)} was made</>,
    sandbox_ending: () => <>the sandbox {oneLine(body.sandbox, 80)} ends in {oneLine(body.seconds, 12)} s: {oneLine(body.reason, 300)}</>,
    sandbox_removed: () => <>the sandbox {oneLine(body.sandbox, 80)} was removed</>,
  };
  const words = said[record.kind];
  if (words) return <span class="untrusted">{words()}</span>;
  const rest = Object.entries(body).filter(([, value]) => value !== "" && value !== null);
  return <span class="untrusted">{oneLine(record.kind, 40).replaceAll("_", " ")}: {oneLine(rest.map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", "), 300)}</span>;
}
