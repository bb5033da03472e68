// The engines of the rules, and all sandboxes.
import { useEffect } from "preact/hooks";
import { call } from "../api.ts";
import { duration, labelTexts, oneLine, plural, secondsOf } from "../format.ts";
import { useLoad, useNow } from "../hooks.ts";
import { Empty, Failure, Skeleton, Text } from "../parts.tsx";
import { Link, sessionPath } from "../router.tsx";

type Engine = { name: string; installed: boolean; sandboxes: number; problem: string };
type Sandbox = {
  address: string;
  engine: string;
  state: string;
  labels: Record<string, string>;
  createdAt?: string;
  expiresAt?: string;
  sessions: number;
  connected: boolean;
  sessionId: string;
  pool: string;
};

type Pool = { name: string; engine: string; warm: number; taken: number; creating: number; waiting: number; warmWanted: number; max: number; open: boolean };

// Engines are listed for each refresh, so not more often.
const EVERY_MS = 10_000;

export function Fleet() {
  const found = useLoad<{ engines: Engine[]; sandboxes: Sandbox[]; pools: Pool[] }>("fleet", (signal) => call("ListSandboxes", {}, signal));
  const now = useNow() / 1000;
  const sandboxes = found.value?.sandboxes ?? [];
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && found.reload(), EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  return (
    <main>
      <div class="page-head">
        <h1 class="page">Fleet</h1>
        <span class="dim">{found.value ? `${plural(sandboxes.length, "sandbox", "sandboxes")} · ${sandboxes.filter((each) => each.sessions).length} in use` : ""}</span>
        <span class="grow" />
        <button onClick={found.reload}>Refresh</button>
      </div>
      <Failure error={found.error} retry={found.reload} />
      {!found.value && found.loading ? <Skeleton rows={5} /> : null}
      {found.value ? (
        <div class="tiles">
          {found.value.engines.map((each) => (
            <div key={each.name} class={`tile ${each.problem ? "bad" : ""}`}>
              <span class="dim">engine</span>
              <strong>{oneLine(each.name, 40)}</strong>
              <span>{each.problem ? <span class="failed"><Text value={each.problem} /></span> : each.installed ? plural(each.sandboxes, "sandbox", "sandboxes") : <span class="dim">not installed here</span>}</span>
            </div>
          ))}
          {found.value.pools.map((each) => (
            <div key={each.name} class={`tile pool ${each.open ? "" : "bad"}`}>
              <span class="dim">pool on {oneLine(each.engine, 20)}</span>
              <strong>{oneLine(each.name, 40)}</strong>
              <Meter pool={each} />
              <span class="number">
                {each.open ? (
                  <>
                    {each.taken} in use · {each.warm} of {each.warmWanted} warm{each.creating ? ` · ${each.creating} being made` : ""} · at most {each.max}
                    {each.waiting ? <span class="asks"> · {each.waiting} waiting</span> : null}
                  </>
                ) : (
                  <span class="failed">its engine does not respond</span>
                )}
              </span>
            </div>
          ))}
          {!found.value.engines.length ? <p class="dim">No profile of the rules allows an engine, so the service makes no sandboxes: sessions run in the ones below.</p> : null}
        </div>
      ) : null}
      {found.value && !sandboxes.length ? <Empty title="No sandbox is known">The first session connects to one.</Empty> : null}
      {sandboxes.length ? (
        <table class="fleet">
          <thead>
            <tr>
              <th>Sandbox</th>
              <th>State</th>
              <th class="number">Sessions</th>
              <th class="number">Age</th>
              <th class="number">Expires in</th>
              <th>Made for</th>
              <th>Labels</th>
            </tr>
          </thead>
          <tbody>
            {sandboxes.map((each) => (
              <tr key={each.address}>
                <td>
                  <Link to={`/sessions?${new URLSearchParams({ sandbox: each.address })}`}>
                    <code class="untrusted">{oneLine(each.address, 60)}</code>
                  </Link>
                </td>
                <td>
                  <span class={`dot ${each.connected ? "on" : ""}`} /> {oneLine(each.state, 20)}
                  {each.connected ? "" : each.state === "running" ? ", not connected" : ""}
                </td>
                <td class="number">{each.sessions}</td>
                <td class="number">{each.createdAt ? duration(now - secondsOf(each.createdAt)) : "–"}</td>
                <td class="number expires">{each.expiresAt ? duration(Math.max(0, secondsOf(each.expiresAt) - now)) : "never"}</td>
                <td>
                  {each.sessionId ? (
                    <Link to={sessionPath(each.sessionId)}>
                      <code>{oneLine(each.sessionId, 12)}</code>
                    </Link>
                  ) : each.pool ? (
                    <span>pool {oneLine(each.pool, 20)}</span>
                  ) : null}
                </td>
                <td>
                  {labelTexts(each.labels).slice(0, 4).map((label) => (
                    <span key={label} class="label untrusted">
                      {label}
                    </span>
                  ))}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      ) : null}
    </main>
  );
}

// A cell for each sandbox that the pool may have: in use, warm, being made, free.
function Meter({ pool }: { pool: Pool }) {
  const cells = Math.min(pool.max, 40);
  const kind = (index: number) => {
    const at = (index * pool.max) / cells;
    return at < pool.taken ? "taken" : at < pool.taken + pool.warm ? "warm" : at < pool.taken + pool.warm + pool.creating ? "creating" : "";
  };
  return (
    <span class="meter" role="img" aria-label={`${pool.taken} in use, ${pool.warm} warm, ${pool.max} at most`}>
      {Array.from({ length: cells }, (_, index) => (
        <i key={index} class={kind(index)} />
      ))}
    </span>
  );
}
