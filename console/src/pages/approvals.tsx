// Commands that wait for an approval: the whole command, its rule, where it would run, and what ran before it.
import { useState } from "preact/hooks";
import { call, ServiceError } from "../api.ts";
import { clock, duration, oneLine, secondsOf, visible } from "../format.ts";
import { useKeys, useLoad, useNow } from "../hooks.ts";
import { Code, Empty, Failure, Rule, Skeleton, Text, Time } from "../parts.tsx";
import { Link, sessionPath } from "../router.tsx";
import type { Approval, Command, Session } from "../types.ts";

// Programs and options that change or remove things, leave the sandbox's bounds, or hide what runs.
const RISKY =
  /(\b(?:sudo|su|doas|rm|rmdir|dd|shred|mkfs[.\w]*|chmod|chown|kill|pkill|reboot|shutdown|curl|wget|nc|ncat|ssh|scp|rsync|eval|exec|base64|xargs|crontab|docker|kubectl|truncate)\b|\bgit\s+(?:push|reset|clean)\b|(?<=\s)--?(?:force|hard|no-verify|recursive|rf|fr|delete)\b|\|\s*(?:ba|z|da)?sh\b|>{1,2}\s*\/\S*|\\u\{[0-9a-f]+\})/g;

export function Highlighted({ command, rule }: { command: string; rule: string }) {
  const words: string[] = rule.match(/[\w.-]+/g) ?? [];
  const shown = visible(command);
  const parts = shown.split(RISKY);
  return (
    <pre class="command untrusted">
      {parts.map((part, index) => (index % 2 ? <mark key={index}>{part}</mark> : words.includes(part.trim()) && part.trim() ? <mark key={index}>{part}</mark> : part))}
    </pre>
  );
}

export type ApprovalsProps = {
  approvals: Approval[] | undefined;
  error: ServiceError | undefined;
  reload: () => void;
  sound: boolean;
  onSound: (on: boolean) => void;
};

export function Approvals({ approvals, error, reload, sound, onSound }: ApprovalsProps) {
  const [chosen, setChosen] = useState("");
  const [asked, setAsked] = useState<{ id: string; approve: boolean }>();
  const [problem, setProblem] = useState("");
  const [done, setDone] = useState("");
  const [comments, setComments] = useState<Record<string, string>>({});
  const now = useNow();
  const open = approvals ?? [];
  const current = open.find((each) => each.approvalId === chosen) ?? open[0];

  const answer = async (approval: Approval, approve: boolean) => {
    if (asked?.id !== approval.approvalId || asked.approve !== approve) {
      setChosen(approval.approvalId);
      return setAsked({ id: approval.approvalId, approve });
    }
    setAsked(undefined);
    try {
      await call("AnswerApproval", { approvalId: approval.approvalId, approve, comment: comments[approval.approvalId] ?? "" });
      setProblem("");
      setDone(`${approve ? "Allowed" : "Refused"}: ${oneLine(approval.command, 120)}`);
    } catch (failed) {
      setProblem(failed instanceof ServiceError ? failed.words : String(failed));
    }
    reload();
  };
  // Another choice takes the question back.
  const choose = (id: string) => {
    setChosen(id);
    if (asked?.id !== id) setAsked(undefined);
  };
  const step = (by: number) => {
    const at = open.findIndex((each) => each.approvalId === current?.approvalId);
    choose(open[Math.min(open.length - 1, Math.max(0, at + by))]?.approvalId ?? "");
  };
  useKeys({
    a: () => current && void answer(current, true),
    r: () => current && void answer(current, false),
    j: () => step(1),
    k: () => step(-1),
    Escape: () => setAsked(undefined),
  });

  return (
    <main>
      <div class="page-head">
        <h1 class="page">Approvals</h1>
        <span class="dim">{approvals ? `${open.length} waiting` : ""}</span>
        <span class="grow" />
        <label class="check dim">
          <input type="checkbox" checked={sound} onChange={(event) => onSound(event.currentTarget.checked)} /> sound for new ones
        </label>
      </div>
      <div class="columns">
      <section>
      <Failure error={error} retry={reload} />
      {problem ? (
        <div class="notice bad" role="alert">
          <span class="untrusted">{visible(problem)}</span>
        </div>
      ) : null}
      {done ? (
        <div class="notice" role="status">
          <span class="untrusted">{done}</span>
        </div>
      ) : null}
      {!approvals && !error ? <Skeleton rows={3} /> : null}
      {approvals && !open.length ? (
        <Empty title="Nothing waits for an approval">
          <p>Commands that a rule with the verdict “ask” matches appear here. The title of this tab counts them.</p>
        </Empty>
      ) : null}
      <ol class="approvals">
        {open.map((each) => {
          const mine = each.approvalId === current?.approvalId;
          const confirm = asked?.id === each.approvalId ? asked : undefined;
          const left = secondsOf(each.expiresAt) - now / 1000;
          return (
            <li key={each.approvalId} class={mine ? "chosen" : ""} onPointerDown={() => choose(each.approvalId)}>
              <header>
                <strong>
                  <Text value={each.agentId} longest={60} />
                </strong>
                <span>
                  in{" "}
                  <Link to={sessionPath(each.sessionId)}>
                    <code>{oneLine(each.sessionId, 40)}</code>
                  </Link>
                </span>
                <span class={left < 60 ? "asks" : "dim"}>{left > 0 ? `expires in ${duration(left)}` : "expired"}</span>
              </header>
              <Highlighted command={each.command} rule={each.rule} />
              <dl class="facts">
                <dt>Reason</dt>
                <dd class="untrusted">{visible(each.reason)}</dd>
                <dt>Directory</dt>
                <dd>
                  <Where sessionId={each.sessionId} />
                </dd>
                <dt>Rule</dt>
                <dd>
                  <Rule rule={each.rule} />
                </dd>
                <dt>Asked</dt>
                <dd>
                  <Time at={each.askedAt} />
                </dd>
                {mine ? <Before sessionId={each.sessionId} /> : null}
              </dl>
              <div class="actions">
                <input
                  placeholder="Comment for the audit"
                  aria-label="Comment"
                  maxLength={1000}
                  value={comments[each.approvalId] ?? ""}
                  onInput={(event) => setComments({ ...comments, [each.approvalId]: event.currentTarget.value })}
                />
                <button class={`good ${confirm?.approve === true ? "sure" : ""}`} onClick={() => void answer(each, true)}>
                  {confirm?.approve === true ? "Really allow?" : "Allow"} {mine ? <kbd>a</kbd> : null}
                </button>
                <button class={`danger ${confirm?.approve === false ? "sure" : ""}`} onClick={() => void answer(each, false)}>
                  {confirm?.approve === false ? "Really refuse?" : "Refuse"} {mine ? <kbd>r</kbd> : null}
                </button>
              </div>
            </li>
          );
        })}
      </ol>
      </section>
      <Answered key={approvals?.length} />
      </div>
    </main>
  );
}

function Where({ sessionId }: { sessionId: string }) {
  const session = useLoad<Session>(`where ${sessionId}`, (signal) => call("GetSession", { sessionId }, signal));
  const metadata = session.value?.metadata;
  return metadata ? (
    <span class="untrusted">
      <code>{oneLine(metadata.cwd, 200)}</code> <span class="dim">in {oneLine(metadata.sandbox, 60)}</span>
    </span>
  ) : (
    <span class="dim">…</span>
  );
}

// What the session did just before.
function Before({ sessionId }: { sessionId: string }) {
  const found = useLoad<{ commands: Command[] }>(`before ${sessionId}`, (signal) => call("ListCommands", { sessionId }, signal));
  const commands = (found.value?.commands ?? []).slice(0, 3);
  if (!commands.length) return null;
  return (
    <>
      <dt>Ran before</dt>
      <dd>
      <ul class="plain-list">
        {commands.map((each) => (
          <li key={each.commandId + each.number}>
            <span class="dim number">{clock(each.startedAt)}</span> <Code value={each.text} longest={120} /> {each.exitCode ? <span class="failed">✗ {each.exitCode}</span> : each.exitCode === 0 ? <span class="ok">✓</span> : null}
          </li>
        ))}
      </ul>
      </dd>
    </>
  );
}

const OUTCOMES: Record<string, string> = { approved: "✓", refused: "✗", expired: "–", abandoned: "–" };

function Answered() {
  const found = useLoad<{ approvals: Approval[] }>("answered", (signal) => call("ListApprovals", { ended: true }, signal));
  const ended = (found.value?.approvals ?? []).filter((each) => each.outcome).slice(0, 20);
  return (
    <aside class="answered">
      <h2>Answered</h2>
      {found.value && !ended.length ? <p class="dim">Nothing yet.</p> : null}
      <ol>
        {ended.map((each) => (
          <li key={each.approvalId}>
            <div>
              <span class={`outcome ${oneLine(each.outcome, 20)}`}>
                {OUTCOMES[each.outcome] ?? "–"} {oneLine(each.outcome, 20)}
              </span>
              <span class="dim">
                <Time at={each.askedAt} />
              </span>
            </div>
            <Code value={each.command} longest={100} />
            <span class="dim untrusted">{oneLine([each.answeredBy, each.comment].filter(Boolean).join(": "), 200)}</span>
          </li>
        ))}
      </ol>
    </aside>
  );
}
