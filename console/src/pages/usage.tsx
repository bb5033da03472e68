// Usage of all sessions over the last hour, and the sessions that use most.
import { useEffect } from "preact/hooks";
import { call } from "../api.ts";
import { Chart, rates } from "../charts.tsx";
import { oneLine, plural, secondsOf, size } from "../format.ts";
import { useLoad } from "../hooks.ts";
import { ModelTable, modelWords, useModelCalls } from "../model_calls.tsx";
import { Empty, Failure, Skeleton, Spark, StateMark, Text } from "../parts.tsx";
import { Link, sessionPath } from "../router.tsx";
import type { Caller, Sample } from "../types.ts";
import type { SummaryPage } from "./sessions.tsx";

export function UsageCharts({ samples, small = false }: { samples: Sample[]; small?: boolean }) {
  const points = (value: (each: Sample) => number) => samples.map((each) => ({ at: secondsOf(each.sampledAt), value: value(each) }));
  const height = small ? 64 : 140;
  return (
    <div class={`charts ${small ? "small" : ""}`}>
      <Chart title="CPU" points={points((each) => each.cpuPercent)} words={(value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} %`} height={height} floor={10} />
      <Chart title="Memory" points={points((each) => Number(each.memoryBytes))} words={size0} height={height} floor={1e6} />
      <Chart title="Processes" points={points((each) => each.processCount)} words={(value) => String(Math.round(value))} height={height} floor={2} />
      <Chart title="Output" points={rates(points((each) => Number(each.outputBytes)))} words={(value) => `${size0(value)}/s`} height={height} floor={1000} />
    </div>
  );
}

const size0 = (value: number) => size(Math.round(value));

export function Usage({ caller }: { caller: Caller }) {
  const operator = caller.role === "operator";
  const totals = useLoad<{ samples: Sample[] }>("totals", async (signal) => (operator ? call("ListUsage", {}, signal) : { samples: [] }));
  const sessions = useLoad<SummaryPage>("usage sessions", (signal) => call("ListSummaries", { states: ["RUNNING", "BUSY", "IDLE"], pageSize: 200 }, signal));
  useEffect(() => {
    const timer = setInterval(() => {
      if (document.hidden) return;
      totals.reload();
      sessions.reload();
    }, 5000);
    return () => clearInterval(timer);
  }, []);
  const rows = (sessions.value?.sessions ?? []).filter((each) => each.usage).sort((a, b) => (b.usage!.cpuPercent - a.usage!.cpuPercent) || Number(b.usage!.memoryBytes) - Number(a.usage!.memoryBytes));
  const last = totals.value?.samples.at(-1);
  const models = useModelCalls("", operator);
  return (
    <main>
      <div class="page-head">
        <h1 class="page">Usage</h1>
        <span class="dim">{last ? `${plural(last.sessions, "session")} of this replica, the last hour` : operator ? "" : "your sessions now"}</span>
      </div>
      <Failure error={totals.error ?? sessions.error} />
      {!sessions.value && sessions.loading ? <Skeleton rows={6} /> : null}
      {operator && totals.value ? <UsageCharts samples={totals.value.samples} /> : null}
      {models.value?.totals.length ? (
        <>
          <h2>
            Model calls <span class="dim">{modelWords(models.value)}</span>
          </h2>
          <ModelTable totals={models.value.totals} />
        </>
      ) : null}
      <h2>Sessions by use</h2>
      {rows.length ? (
      <table class="usage">
        <thead>
          <tr>
            <th>State</th>
            <th>Session</th>
            <th>Agent</th>
            <th class="number">CPU</th>
            <th class="cpu" />
            <th class="number">Memory</th>
            <th class="number">Processes</th>
            <th class="number">Output</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, 50).map((each) => (
            <tr key={each.sessionId}>
              <td>
                <StateMark state={each.state} approvals={each.approvals} />
              </td>
              <td>
                <Link to={sessionPath(each.sessionId)}>
                  <code>{oneLine(each.sessionId, 14)}</code>
                </Link>
              </td>
              <td>
                <Text value={each.agentId} longest={30} />
              </td>
              <td class="number">{each.usage!.cpuPercent.toFixed(1)} %</td>
              <td class="cpu">
                <Spark values={each.cpuHistory} label="CPU" />
              </td>
              <td class="number">{size(each.usage!.memoryBytes)}</td>
              <td class="number">{each.usage!.processCount}</td>
              <td class="number">{size(each.usage!.outputBytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      ) : null}
      {sessions.value && !rows.length ? <Empty title="No session has a sample yet">The monitor takes one of each open session every few seconds.</Empty> : null}
    </main>
  );
}
