// The engines of the rules, and all sandboxes.
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

export function Fleet() {
  const found = useLoad<{ engines: Engine[]; sandboxes: Sandbox[] }>("fleet", (signal) => call("ListSandboxes", {}, signal));
  const now = useNow() / 1000;
  const sandboxes = found.value?.sandboxes ?? [];
  const pools = Map.groupBy(sandboxes.filter((each) => each.pool), (each) => each.pool);
  return (
    <main>
      <div class="page-head">
        <h1 class="page">Fleet</h1>
        <button onClick={found.reload}>Refresh</button>
      </div>
      <Failure error={found.error} retry={found.reload} />
      {!found.value && found.loading ? <Skeleton rows={5} /> : null}
      {found.value ? (
        <div class="tiles">
          {found.value.engines.map((each) => (
            <div key={each.name} class={`tile ${each.problem ? "bad" : ""}`}>
              <strong>{oneLine(each.name, 40)}</strong>
              <span>{each.problem ? <Text value={each.problem} /> : each.installed ? plural(each.sandboxes, "sandbox").replace("sandboxs", "sandboxes") : "not installed here"}</span>
            </div>
          ))}
          {[...pools].map(([name, all]) => (
            <div key={name} class="tile">
              <strong>pool {oneLine(name, 40)}</strong>
              <span>
                {all.length} made, {all.filter((each) => each.sessions).length} in use
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
                <td class="number">{each.expiresAt ? duration(Math.max(0, secondsOf(each.expiresAt) - now)) : "never"}</td>
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
