// One session: its terminal or its commands, its policy, its usage, its time line, and its replay.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { call, ServiceError, stream, type StreamState } from "../api.ts";
import { clockSpan, duration, endWords, labelTexts, oneLine, secondsOf, size, visible } from "../format.ts";
import { useKeys, useLoad, useNow } from "../hooks.ts";
import { LiveTerminal } from "../live_terminal.tsx";
import { ModelPanel, modelWords, useModelCalls } from "../model_calls.tsx";
import { Code, Dialog, Failure, Skeleton, Spark, StateMark, Text, Time } from "../parts.tsx";
import { loadRecording, Player, saveCast, type Recording } from "../player.tsx";
import { go, Link, usePlace, withQuery } from "../router.tsx";
import { ShellBlocks } from "../shell_blocks.tsx";
import { Timeline, type Mark } from "../timeline.tsx";
import { PAGE_EVENTS } from "../types.ts";
import type { Approval, AuditRecord, Caller, Command, ModelCalls, Sample, Session, SessionEvent, State, Summary } from "../types.ts";
import { bodyOf } from "../audit_words.tsx";
import { ACTIONS, AuditTable, commandTexts, withoutStarts } from "./audit.tsx";
import { UsageCharts } from "./usage.tsx";

const SPEEDS = [0.5, 1, 2, 5, 10];
const TABS = ["overview", "policy", "usage", "models", "audit"] as const;
type Tab = (typeof TABS)[number];

export function SessionPage({ id, caller }: { id: string; caller: Caller }) {
  const place = usePlace();
  const session = useLoad<Session>(`session ${id}`, (signal) => call("GetSession", { sessionId: id }, signal));
  const commands = useLoad<{ commands: Command[]; nextPageToken: string }>(`commands ${id}`, (signal) => call("ListCommands", { sessionId: id }, signal));
  const marks = useLoad<{ records: AuditRecord[] }>(`marks ${id}`, (signal) =>
    call("ListAudit", { sessionId: id, kinds: ["decision", "approval_answered", "takeover", "release", "error", "input"], pageSize: 500, newestFirst: true }, signal),
  );
  const models = useModelCalls(id);
  const asks = useLoad<{ approvals: Approval[] }>(`asks ${id}`, (signal) => call("ListApprovals", { sessionId: id }, signal));
  const [state, setState] = useState<State>();
  const [live, setLive] = useState<StreamState>("connecting");
  const [title, setTitle] = useState("");
  const [typing, setTyping] = useState(false);
  const [fits, setFits] = useState(false);
  const [notice, setNotice] = useState<{ text: string; bad: boolean }>();
  const [closing, setClosing] = useState(false);
  const [gone, setGone] = useState(false);
  const [tab, setTab] = useState<Tab>("overview");
  const now = useNow();

  // One subscription for everything around the terminal; its positions lose no event over a reconnect.
  useEffect(() => {
    let since = "";
    let timer = 0;
    let last = 0;
    // Events in quick succession are one refresh, and a stream of events does not abort every load by the next one.
    const refresh = () => {
      if (timer) return;
      timer = window.setTimeout(() => {
        timer = 0;
        last = performance.now();
        session.reload();
        commands.reload();
        marks.reload();
        asks.reload();
        models.reload();
      }, Math.max(150, last + 1000 - performance.now()));
    };
    const events = stream<SessionEvent>("SubscribeSessionEvents", () => ({ sessionId: id, since, types: PAGE_EVENTS }), (event) => {
      since = event.token;
      refresh();
    });
    let before = "";
    const changes = stream<{ session?: Summary; reload: boolean }>("WatchSessions", () => ({ sessionIds: [id], only: true }), ({ session: changed, reload }) => {
      // A sample of the monitor alone changes nothing that is loaded here.
      const now = JSON.stringify(changed ? [changed.state, changed.command, changed.commandAt, changed.exitCode, changed.commandsRun, changed.approvals] : reload);
      if (now !== before) refresh();
      before = now;
    });
    return () => {
      clearTimeout(timer);
      events.close();
      changes.close();
    };
  }, [id]);

  const metadata = session.value?.metadata;
  const shownState = session.value && ["CLOSED", "ERROR", "CLOSING"].includes(session.value.state) ? session.value.state : (state ?? session.value?.state);
  const over = shownState === "CLOSED" || shownState === "ERROR";
  const began = secondsOf(metadata?.createdAt);
  const age = (over ? secondsOf(metadata?.closedAt) : now / 1000) - began;
  const length = Math.max(1, age);
  const at = place.query.get("at");
  const replaying = at !== null;
  const all = useMemo(() => marksOf(commands.value?.commands ?? [], marks.value?.records ?? [], began), [commands.value, marks.value, began]);
  const say = (text: string, bad = false) => setNotice({ text, bad });

  const attempt = async (work: () => Promise<unknown>) => {
    try {
      await work();
      return true;
    } catch (error) {
      say(error instanceof ServiceError ? error.words : String(error), true);
      return false;
    }
  };
  const takeOver = async () => {
    if (typing) {
      setTyping(false);
      setFits(false);
      if (!mine) await attempt(() => call("TakeOver", { sessionId: id, release: true }));
    } else if (mine || (await attempt(() => call("TakeOver", { sessionId: id })))) {
      setTyping(true);
      setNotice(undefined);
    }
  };
  const control = (type: string) => void attempt(() => call("SendInput", { sessionId: id, actions: [{ type }] }));
  const mine = metadata?.agentId === caller.agentId;
  const seek = (time: number) => go(withQuery(place, { at: time.toFixed(3) }), { replace: replaying });
  // From the start, or from half a minute ago while the session runs.
  const replay = () => seek(over ? 0 : Math.max(0, length - 30));
  useKeys({ t: () => !over && !replaying && void takeOver(), l: () => replaying && go(withQuery(place, { at: "" })), p: () => !replaying && replay() });

  if (!session.value) {
    return (
      <main>
        {session.error ? <Missing error={session.error} id={id} /> : <Skeleton rows={10} />}
      </main>
    );
  }
  return (
    <main class="session">
      <header class="session-head">
        <StateMark state={shownState ?? "UNKNOWN"} approvals={asks.value?.approvals.length} />
        <code class="session-id">{oneLine(id, 60)}</code>
        <Link to={`/sessions?${new URLSearchParams({ agent: metadata!.agentId })}`}>
          <Text value={metadata!.agentId} longest={60} />
        </Link>
        <span class="dim untrusted">{oneLine(metadata!.sandbox, 60)}</span>
        <span class="dim">{duration(age)}</span>
        {title ? <span class="dim untrusted title" title="The title that the program set">{oneLine(title, 80)}</span> : null}
        {labelTexts(metadata!.labels).map((each) => (
          <span key={each} class="label untrusted">
            {each}
          </span>
        ))}
        <span class="grow" />
        {!over ? (
          <button class="danger" onClick={() => setClosing(true)}>
            Close session
          </button>
        ) : null}
      </header>
      {notice ? (
        <div class={`notice ${notice.bad ? "bad" : ""}`} role="status">
          <span class="untrusted">{visible(notice.text)}</span>
          <button class="quiet" onClick={() => setNotice(undefined)} aria-label="Dismiss">
            ✕
          </button>
        </div>
      ) : null}
      {(asks.value?.approvals ?? []).map((each) => (
        <div key={each.approvalId} class="notice ask">
          <span>
            <b class="asks">Needs approval:</b> <Code value={each.command} longest={160} />
          </span>
          <Link to="/approvals">Answer</Link>
        </div>
      ))}
      {over ? <Ended session={session.value} gone={gone} /> : null}
      <div class="session-grid">
        <section class="screen-column">
          {replaying ? (
            <Replay id={id} at={Number(at) || 0} marks={all} length={length} began={began} over={over} onSeek={seek} />
          ) : metadata!.kind === "TERMINAL" ? (
            <>
              <LiveTerminal sessionId={id} typing={typing && !over} fits={fits} onState={setState} onStream={setLive} onTitle={setTitle} onNotice={say} onLeave={() => void takeOver()} onGone={() => setGone(true)} />
              <div class="controls">
                <LiveMark state={live} over={over} typing={typing} />
                {!over ? (
                  <>
                    <button class={typing ? "" : "primary"} onClick={() => void takeOver()}>
                      {typing ? "Stop typing" : mine ? "Type" : "Take over"} <kbd>{typing ? "Ctrl Shift L" : "t"}</kbd>
                    </button>
                    <button onClick={() => control("CTRL_C")}>Ctrl-C</button>
                    <button onClick={() => control("SIGTERM")}>SIGTERM</button>
                    {typing ? (
                      <label class="check">
                        <input type="checkbox" checked={fits} onChange={(event) => setFits(event.currentTarget.checked)} /> size of this page
                      </label>
                    ) : null}
                  </>
                ) : null}
                {gone ? null : (
                  <button class={over ? "primary" : ""} onClick={replay}>
                    Replay <kbd>p</kbd>
                  </button>
                )}
                <span class="grow" />
                <span class="dim number">
                  {metadata!.cols} × {metadata!.rows}
                </span>
              </div>
              <Timeline length={length} at={length} marks={all} live={!over} began={began} onSeek={seek} />
            </>
          ) : (
            <>
              <ShellBlocks sessionId={id} commands={commands.value?.commands ?? []} caller={caller} over={over} gone={gone} onNotice={say} onGone={() => setGone(true)} />
              <Timeline length={length} at={length} marks={all} live={!over} began={began} onSeek={seek} />
            </>
          )}
        </section>
        <aside>
          <div class="tabs" role="tablist" onKeyDown={stepTab}>
            {TABS.filter((each) => each !== "models" || models.value?.calls.length).map((each) => (
              <button key={each} role="tab" aria-selected={tab === each} tabIndex={tab === each ? 0 : -1} onClick={() => setTab(each)}>
                {each}
              </button>
            ))}
          </div>
          {tab === "overview" ? (
            <>
              <Commands commands={commands.value?.commands} more={!!commands.value?.nextPageToken} began={began} onSeek={seek} error={commands.error} />
              <Overview session={session.value} id={id} over={over} models={models.value} />
            </>
          ) : null}
          {tab === "policy" ? <Policy session={session.value} /> : null}
          {tab === "models" ? <ModelPanel found={models} /> : null}
          {tab === "usage" ? <SessionUsage id={id} over={over} /> : null}
          {tab === "audit" ? <SessionAudit id={id} turn={commands.value?.commands.length ?? 0} /> : null}
        </aside>
      </div>
      {closing ? <CloseDialog id={id} onDone={() => setClosing(false)} onNotice={say} reload={session.reload} /> : null}
    </main>
  );
}

// The arrows go from tab to tab, and open it.
function stepTab(event: KeyboardEvent): void {
  const by = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key] as "nextElementSibling" | undefined;
  const next = by && (event.target as HTMLElement)[by];
  if (!(next instanceof HTMLElement)) return;
  event.stopPropagation();
  next.focus();
  next.click();
}

function LiveMark({ state, over, typing }: { state: StreamState; over: boolean; typing: boolean }) {
  const words = over ? "ended" : state === "live" ? (typing ? "typing" : "watching") : state === "ended" ? "ended" : state === "away" ? "reconnecting" : "connecting";
  return <span class={`live-mark ${over ? "ended" : state}`}>{words}</span>;
}

function Missing({ error, id }: { error: ServiceError; id: string }) {
  if (error.code !== "not_found") return <Failure error={error} />;
  return (
    <div class="empty">
      <strong>No session {oneLine(id, 60)}</strong>
      <p>It does not exist, belongs to another agent, or was removed after the retention of the audit log.</p>
      <p>
        <Link to="/sessions">All sessions</Link>
      </p>
    </div>
  );
}

// Why the session ended, since when, and what is kept.
function Ended({ session: { metadata, state }, gone }: { session: Session; gone: boolean }) {
  return (
    <div class={`notice ${state === "ERROR" ? "bad" : ""}`}>
      <span>
        {state === "ERROR" ? "Failed" : "Closed"} <Time at={metadata.closedAt} />: <span class="untrusted">{endWords(visible(metadata.summary || metadata.closeReason))}.</span>
        <span class="dim"> The audit log has its commands{gone ? "." : "; the replay lasts as long as the sandbox keeps its output."}</span>
      </span>
    </div>
  );
}

function marksOf(commands: Command[], records: AuditRecord[], began: number): Mark[] {
  const made = commands.flatMap((each): Mark[] => [
    { time: secondsOf(each.startedAt) - began, kind: each.exitCode ? "failed" : "command", text: each.text + (each.exitCode ? ` — exit ${each.exitCode}` : "") },
    // The prompt that follows a command.
    ...(each.endedAt ? [{ time: secondsOf(each.endedAt) - began, kind: "prompt" as const, text: `prompt after ${each.text}` }] : []),
  ]);
  for (const record of records) {
    const body = bodyOf(record);
    const time = secondsOf(record.at) - began;
    if (record.kind === "decision") made.push({ time, kind: body.verdict === "ask" ? "approval" : "failed", text: `${body.verdict === "ask" ? "approval asked" : "refused"}: ${String(body.command ?? "")}` });
    else if (record.kind === "approval_answered") made.push({ time, kind: "approval", text: `${String(body.outcome)}: ${String(body.command ?? "")}` });
    else if (record.kind === "input") {
      if (body.hidden) made.push({ time, kind: "prompt", text: "asked for hidden input" });
    } else if (record.kind === "error") made.push({ time, kind: "failed", text: String(body.detail ?? "error") });
    else made.push({ time, kind: "takeover", text: `${record.kind} by ${String(body.by ?? "")}` });
  }
  return made;
}

function Replay(props: { id: string; at: number; marks: Mark[]; length: number; began: number; over: boolean; onSeek: (time: number) => void }) {
  const place = usePlace();
  const [loaded, setLoaded] = useState(0);
  const recording = useLoad<Recording>(`recording ${props.id}`, (signal) => loadRecording(props.id, signal, setLoaded));
  const [playing, setPlaying] = useState(false);
  const [time, setTime] = useState(props.at);
  const [speed, setSpeed] = useState(1);
  const shown = useRef(0);
  useEffect(() => setTime(props.at), [props.at]);
  const end = recording.value?.events.at(-1)?.time ?? props.length;
  const move = (to: number) => {
    setTime(to);
    props.onSeek(to);
  };
  const toggle = () => {
    if (!playing && time >= end - 0.05) setTime(0);
    if (playing) props.onSeek(time);
    setPlaying(!playing);
  };
  useKeys({
    " ": toggle,
    ArrowLeft: () => move(Math.max(0, time - 5)),
    ArrowRight: () => move(Math.min(end, time + 5)),
    ">": () => setSpeed(SPEEDS[Math.min(SPEEDS.length - 1, SPEEDS.indexOf(speed) + 1)]!),
    "<": () => setSpeed(SPEEDS[Math.max(0, SPEEDS.indexOf(speed) - 1)]!),
  });
  const longest = Math.max(props.length, end);
  return (
    <>
      {recording.error ? (
        <div class="terminal-box gone">
          <p>
            <strong>There is no recording any more.</strong> The sandbox keeps the output of a session for a limited time; the audit log still has its commands.
          </p>
          <p class="dim untrusted">{visible(recording.error.words)}</p>
        </div>
      ) : !recording.value ? (
        <div class="terminal-box gone">
          <p>Loading the recording… {size(loaded)}</p>
        </div>
      ) : (
        <Player
          recording={recording.value}
          at={time}
          playing={playing}
          speed={speed}
          onTime={(value) => {
            // Ten times a second is enough for the strip.
            if (Math.abs(value - shown.current) > 0.1 * speed || value >= end) {
              shown.current = value;
              setTime(value);
            }
          }}
          onEnd={() => setPlaying(false)}
        />
      )}
      <div class="controls">
        <button class="primary play" onClick={toggle} disabled={!recording.value} aria-label={playing ? "Pause" : "Play"}>
          {playing ? "❚❚ Pause" : "▶ Play"}
        </button>
        <span class="number" data-testid="time">
          {clockSpan(time)} / {clockSpan(longest)}
        </span>
        <select aria-label="Speed" value={String(speed)} onChange={(event) => setSpeed(Number(event.currentTarget.value))}>
          {SPEEDS.map((each) => (
            <option key={each} value={String(each)}>
              {each}×
            </option>
          ))}
        </select>
        <button onClick={() => recording.value && saveCast(props.id, recording.value)} disabled={!recording.value} title="asciicast v2, for asciinema and holdfast replay">
          Download .cast
        </button>
        <span class="grow" />
        {recording.value?.cut ? <span class="asks">only the first {size(loaded)}</span> : null}
        <button onClick={() => go(withQuery(place, { at: "" }))}>{props.over ? "Last screen" : "● Live"}</button>
      </div>
      <Timeline length={longest} at={time} marks={props.marks} live={false} began={props.began} onSeek={move} />
    </>
  );
}

function Commands(props: { commands: Command[] | undefined; more: boolean; began: number; onSeek: (time: number) => void; error: ServiceError | undefined }) {
  const now = useNow();
  const [all, setAll] = useState(false);
  if (!props.commands) return props.error ? <Failure error={props.error} /> : <Skeleton rows={4} />;
  const failed = props.commands.filter((each) => each.exitCode).length;
  const shown = all ? props.commands : props.commands.slice(0, 100);
  return (
    <section class="panel">
      <h2>
        Commands <span class="dim">{props.commands.length.toLocaleString()}{props.more ? " and more" : ""} · {failed ? <span class="failed">{failed} failed</span> : "none failed"}</span>
      </h2>
      {!props.commands.length ? <p class="dim">None yet.</p> : null}
      <ol class="commands">
        {shown.map((each) => {
          const running = !each.endedAt;
          return (
            <li key={each.commandId + each.number} class={each.exitCode ? "failed-row" : ""}>
              <button class="quiet" onClick={() => props.onSeek(Math.max(0, secondsOf(each.startedAt) - props.began))} title="Replay from here">
                <span class="dim number">
                  <Time at={each.startedAt} />
                </span>
                <Code value={each.text || "(not known)"} longest={140} />
                <span class={running ? "busy" : each.exitCode ? "failed" : "ok"}>{running ? "●" : each.exitCode ? `✗ ${each.exitCode}` : each.exitCode === 0 ? "✓" : "?"}</span>
                <span class="number dim">{running ? duration(now / 1000 - secondsOf(each.startedAt)) : duration(each.durationSeconds)}</span>
              </button>
            </li>
          );
        })}
      </ol>
      {!all && props.commands.length > 100 ? <button onClick={() => setAll(true)}>Show all {props.commands.length}</button> : null}
    </section>
  );
}

// The short lines under the commands; the tabs have the whole.
function Overview(props: { session: Session; id: string; over: boolean; models: ModelCalls | undefined }) {
  const { metadata } = props.session;
  const usage = useLoad<{ samples: Sample[] }>(`overview ${props.id}`, (signal) => call("ListUsage", { sessionId: props.id }, signal));
  useEffect(() => {
    if (props.over) return;
    const timer = setInterval(() => !document.hidden && usage.reload(), 5000);
    return () => clearInterval(timer);
  }, [props.over]);
  const samples = props.over ? [] : (usage.value?.samples ?? []);
  const last = samples.at(-1);
  const latest = samples.slice(-24);
  return (
    <section class="panel overview">
      <dl class="facts">
        <dt>Policy</dt>
        <dd class="untrusted">
          {oneLine(metadata.policy.profile, 40)} · network {oneLine(metadata.policy.network || "of the sandbox", 40)}
        </dd>
        <dt>Enforced</dt>
        <dd class="untrusted">
          {oneLine(guards(metadata.enforced), 200) || "nothing"}
          {metadata.unenforced.length ? <div class="asks">not enforced: {oneLine(guards(metadata.unenforced), 200)}</div> : null}
        </dd>
        {last ? (
          <>
            <dt>CPU</dt>
            <dd class="measure">
              <Spark values={latest.map((each) => each.cpuPercent)} label="CPU" width={96} /> {last.cpuPercent.toFixed(1)} %
            </dd>
            <dt>Memory</dt>
            <dd class="measure">
              <Spark values={latest.map((each) => Number(each.memoryBytes) / 1e6)} label="Memory" width={96} /> {size(last.memoryBytes)}
            </dd>
            <dt>Processes</dt>
            <dd class="measure">{last.processCount.toLocaleString()}</dd>
          </>
        ) : null}
        {props.models?.calls.length ? (
          <>
            <dt>Model</dt>
            <dd>{modelWords(props.models)}</dd>
          </>
        ) : null}
      </dl>
    </section>
  );
}

const guards = (names: string[]) => names.join(", ").replaceAll("_", " ");

// A limit is a round number: 30m, 8h.
const limit = (seconds: number) => (seconds ? duration(seconds).replace(/(?<=[dhm])0+[hms]$/, "") : "none");

const RESOURCES: Record<string, [string, (value: number | string) => string]> = {
  cpuCores: ["CPU cores", String],
  cpuSeconds: ["CPU time", (value) => limit(Number(value))],
  memoryBytes: ["Memory", size],
  processes: ["Processes", (value) => Number(value).toLocaleString()],
  outputBytes: ["Output", size],
  fileSizeBytes: ["File size", size],
};

function Policy({ session: { metadata } }: { session: Session }) {
  const { policy } = metadata;
  const limits = Object.entries(policy.resources ?? {}).filter(([, value]) => Number(value));
  const rows: [string, string][] = [
    ["Profile", policy.profile],
    ["Network", policy.network || "as the sandbox"],
    ["Enforced", guards(metadata.enforced) || "nothing"],
    ["Not enforced", guards(metadata.unenforced)],
    ["Confinement", metadata.sandboxMode],
    ["Directory", metadata.cwd],
    ["Shell", metadata.shell || "bash"],
    ["Idle limit", limit(policy.idleTimeoutSeconds)],
    ["Lifetime", limit(policy.maxLifetimeSeconds)],
    ["Background", policy.allowBackgroundProcesses ? "may outlive the session" : "ends with the session"],
    ...limits.map(([name, value]): [string, string] => {
      const [label, words] = RESOURCES[name] ?? [name, String];
      return [label, `at most ${words(value)}`];
    }),
    ...Object.entries(metadata.environment).map(([name, value]): [string, string] => [`$${name}`, value]),
  ];
  return (
    <section class="panel">
      <dl class="facts">
        {rows
          .filter(([, value]) => value)
          .map(([name, value]) => (
            <>
              <dt class="untrusted" key={name}>
                {oneLine(name, 60)}
              </dt>
              <dd class={`untrusted ${name === "Not enforced" ? "asks" : ""}`}>{oneLine(value, 2000)}</dd>
            </>
          ))}
      </dl>
    </section>
  );
}

function SessionUsage({ id, over }: { id: string; over: boolean }) {
  const usage = useLoad<{ samples: Sample[] }>(`usage ${id}`, (signal) => call("ListUsage", { sessionId: id }, signal));
  useEffect(() => {
    if (over) return;
    const timer = setInterval(() => !document.hidden && usage.reload(), 5000);
    return () => clearInterval(timer);
  }, [over]);
  return (
    <section class="panel">
      <Failure error={usage.error} />
      {over ? <p class="dim">Samples are kept while a session is open.</p> : null}
      {usage.value && !over ? <UsageCharts samples={usage.value.samples} small /> : null}
    </section>
  );
}

function SessionAudit({ id, turn }: { id: string; turn: number }) {
  const rows = useLoad<{ records: AuditRecord[] }>(`audit ${id} ${turn}`, (signal) => call("ListAudit", { sessionId: id, kinds: ACTIONS, newestFirst: true, pageSize: 100 }, signal));
  const records = rows.value?.records ?? [];
  return (
    <section class="panel">
      <p>
        <Link to={`/audit?${new URLSearchParams({ session: id })}`}>All rows, with filters and export</Link>
      </p>
      <Failure error={rows.error} />
      <AuditTable records={withoutStarts(records)} commands={commandTexts(records)} />
    </section>
  );
}

function CloseDialog(props: { id: string; onDone: () => void; onNotice: (text: string, bad?: boolean) => void; reload: () => void }) {
  const close = async (mode: "GRACEFUL" | "FORCE") => {
    props.onDone();
    try {
      const { summary } = await call<{ summary: string }>("CloseSession", { sessionId: props.id, mode });
      props.onNotice(summary || "Closed.");
    } catch (error) {
      props.onNotice(error instanceof ServiceError ? error.words : String(error), true);
    }
    props.reload();
  };
  return (
    <Dialog title="Close this session?" onClose={props.onDone}>
      <p>
        Its programs get TERM and some seconds, then KILL. The audit log stays. <code>{oneLine(props.id, 60)}</code>
      </p>
      <div class="actions">
        <button onClick={props.onDone}>Cancel</button>
        <button onClick={() => void close("FORCE")}>Kill at once</button>
        <button class="danger sure" onClick={() => void close("GRACEFUL")}>
          Close session
        </button>
      </div>
    </Dialog>
  );
}
