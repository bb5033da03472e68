// Turns the service's JSON into texts for the page; pure. Texts of agents and programs pass through `visible`.

import { visible } from "./output.js";

export const OPEN = ["RUNNING", "BUSY", "IDLE", "CLOSING"];
export const OVER = ["CLOSED", "ERROR"];
const LONGEST_CELL = 300; // labels may have 32 KiB, and would fill the screen

// The request for the filters. A page has as many sessions as a person scrolls through.
export function listRequest({ states = "open", agent = "" }, pageToken = "") {
  const selected = states === "open" ? OPEN : states === "all" ? [] : [states];
  return { states: selected, agentId: agent.trim(), pageSize: 200, pageToken };
}

export function sessionRow({ metadata, state }, now) {
  const { sessionId, agentId, kind, sandbox, createdAt, closedAt, usage = {}, labels = {} } = metadata;
  return {
    id: sessionId,
    state,
    cells: [
      state,
      visible(agentId),
      kind.toLowerCase(),
      visible(sandbox),
      span(secondsBetween(createdAt, closedAt ?? now)),
      flags(usage, state).join(", "),
      usage.sampledAt ? `${Math.round(usage.cpuPercent ?? 0)} %` : "",
      usage.sampledAt ? size(usage.memoryBytes) : "",
      cut(pairs(labels)),
    ],
  };
}

function flags(usage, state) {
  if (OVER.includes(state)) return [];
  return [usage.sessionIdle && "idle", usage.longRunningFlag && "long-running"].filter(Boolean);
}

// Names and values of one session, without empty values.
export function facts({ metadata, state }, now) {
  const { policy = {}, usage } = metadata;
  const limits = policy.resources ?? {};
  const rows = [
    ["state", state],
    ["closed", metadata.closeReason],
    ["summary", metadata.summary],
    ["agent", metadata.agentId],
    ["kind", [metadata.kind.toLowerCase(), metadata.shell].filter(Boolean).join(", ")],
    ["sandbox", [metadata.sandbox, metadata.sandboxMode].filter(Boolean).join(", ")],
    ["directory", metadata.cwd || metadata.initialCwd],
    ["enforced", list(metadata.enforced)],
    ["NOT enforced", list(metadata.unenforced)],
    ["created", moment(metadata.createdAt, now)],
    ["last activity", moment(metadata.lastActivityAt, now)],
    ["ends at the latest", metadata.closedAt ? "" : moment(metadata.expiresAt, now)],
    ["closed at", moment(metadata.closedAt, now)],
    ["commands", metadata.commandsRun],
    ["profile", policy.profile],
    ["network", policy.network],
    ["background processes", policy.allowBackgroundProcesses ? "may outlive it" : "end with it"],
    ["idle time", policy.idleTimeoutSeconds ? span(policy.idleTimeoutSeconds) : "no limit"],
    ["lifetime", policy.maxLifetimeSeconds ? span(policy.maxLifetimeSeconds) : "no limit"],
    ["processes", of(usage?.processCount, Number(limits.processes))],
    ["memory", of(size(usage?.memoryBytes), Number(limits.memoryBytes) && size(limits.memoryBytes))],
    ["cpu now", of(usage && `${Math.round(usage.cpuPercent ?? 0)} %`, limits.cpuCores && `${limits.cpuCores} cores`)],
    ["cpu time", of(usage && span(usage.cpuSeconds ?? 0), Number(limits.cpuSeconds) && span(limits.cpuSeconds))],
    ["read, written", usage && `${size(usage.readBytes) || "0 B"}, ${size(usage.writtenBytes) || "0 B"}`],
    ["output", of("", Number(limits.outputBytes) && size(limits.outputBytes))],
    ["file size", of("", Number(limits.fileSizeBytes) && size(limits.fileSizeBytes))],
    ["seen by the monitor", moment(usage?.sampledAt, now)],
    ["flags", usage && flags(usage, state).join(", ")],
    ["labels", pairs(metadata.labels)],
    ["environment", pairs(metadata.environment)],
  ];
  return rows.filter(([, value]) => value).map(([name, value]) => [name, visible(String(value))]);
}

// A row of the audit: the important fields of its body first, the others as name=value.
export function auditRow({ seq, at, kind, commandId, body }) {
  let text = body;
  try {
    const parsed = JSON.parse(body);
    const first = ["type", "verdict", "action", "command", "text", "detail", "reason"];
    const present = (value) => value !== null && value !== "" && value !== undefined;
    const rest = Object.entries(parsed).filter(([name, value]) => !first.includes(name) && present(value));
    text = [
      ...first.map((name) => parsed[name]).filter(present).map(shown),
      ...rest.map(([name, value]) => `${name}=${shown(value)}`),
    ].join("  ");
  } catch {
    // The row was changed in the database: shown as it is; `holdfast audit verify` reports it.
  }
  return { cells: [String(seq), clock(at), kind, commandId ?? "", visible(text)] };
}

export function approvalRow({ approvalId, sessionId, agentId, command, reason, askedAt, expiresAt }, now) {
  const left = secondsBetween(now, expiresAt);
  return {
    id: approvalId,
    sessionId,
    command: visible(command),
    words: `${visible(agentId)} in ${sessionId}, ${span(secondsBetween(askedAt, now))} ago: ${visible(reason)}`,
    left: left > 0 ? `expires in ${span(left)}` : "expired",
  };
}

// The outcome of an input.
export function inputWords({ accepted, approvalId, queueBusy }) {
  if (!accepted) return `The input waits for an approval (${approvalId}).`;
  return queueBusy ? "Accepted; the program has not read all of it yet." : "";
}

const shown = (value) => (typeof value === "string" ? value.trimEnd() : JSON.stringify(value));
const list = (values) => (values ?? []).join(", ");
const of = (used, limit) => [used ? String(used) : "", limit ? `at most ${limit}` : ""].filter(Boolean).join(", ");

// For the table of sessions; the details of a session have the whole text.
function cut(text) {
  return text.length > LONGEST_CELL ? `${text.slice(0, LONGEST_CELL)}…` : text;
}

function pairs(values) {
  return visible(Object.entries(values ?? {}).sort().map(([name, value]) => `${name}=${value}`).join(" "));
}

// Times of the service are strings, those of the page milliseconds.
function secondsBetween(earlier, later) {
  return Math.max(0, (new Date(later) - new Date(earlier)) / 1000);
}

function clock(at) {
  return at ? new Date(at).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "";
}

function moment(at, now) {
  if (!at) return "";
  const distance = new Date(at) > now ? `in ${span(secondsBetween(now, at))}` : `${span(secondsBetween(at, now))} ago`;
  return `${clock(at)} (${distance})`;
}

export function span(seconds) {
  const steps = [["d", 86400], ["h", 3600], ["min", 60]];
  for (const [index, [unit, length]] of steps.entries()) {
    if (seconds < length) continue;
    const [smaller, part] = steps[index + 1] ?? ["s", 1];
    const rest = Math.floor((seconds % length) / part);
    return `${Math.floor(seconds / length)} ${unit}` + (rest ? ` ${rest} ${smaller}` : "");
  }
  return `${Math.floor(seconds)} s`;
}

export function size(bytes) {
  let value = Number(bytes ?? 0);
  if (!value) return "";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return `${+value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${+value.toFixed(1)} GiB`;
}
