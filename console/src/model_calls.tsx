// Model calls that bridges recorded: the sums by model, and the latest calls.
import { call } from "./api.ts";
import { count, duration, money, oneLine } from "./format.ts";
import { useLoad, type Loaded } from "./hooks.ts";
import { Failure, Time } from "./parts.tsx";
import type { ModelCalls, ModelTotal } from "./types.ts";

export const useModelCalls = (id: string, allowed = true): Loaded<ModelCalls> =>
  useLoad<ModelCalls>(`models ${id} ${allowed}`, (signal) => (allowed ? call("ListModelCalls", { sessionId: id }, signal) : Promise.resolve({ calls: [], totals: [], more: false })));

const sum = (totals: ModelTotal[], value: (each: ModelTotal) => number | string) => totals.reduce((all, each) => all + Number(value(each)), 0);

// "41 calls · 812k tokens · 2.14".
export function modelWords({ totals, more }: ModelCalls): string {
  const calls = sum(totals, (each) => each.calls);
  const cost = sum(totals, (each) => each.money);
  const tokens = sum(totals, (each) => each.inputTokens) + sum(totals, (each) => each.outputTokens);
  return `${more ? "latest " : ""}${calls.toLocaleString()} ${calls === 1 ? "call" : "calls"} · ${count(tokens)} tokens${cost ? ` · cost ${money(cost)}` : ""}`;
}

export function ModelTable({ totals }: { totals: ModelTotal[] }) {
  return (
    <table class="models">
      <thead>
        <tr>
          <th>Model</th>
          <th class="number">Calls</th>
          <th class="number">Failed</th>
          <th class="number">Tokens in</th>
          <th class="number">Out</th>
          <th class="number">Cost</th>
        </tr>
      </thead>
      <tbody>
        {totals.map((each) => (
          <tr key={each.model}>
            <td>
              <code class="untrusted">{oneLine(each.model || "(none)", 60)}</code>
            </td>
            <td class="number">{Number(each.calls).toLocaleString()}</td>
            <td class="number">{Number(each.failed) ? <span class="failed">{each.failed}</span> : "–"}</td>
            <td class="number">{count(each.inputTokens)}</td>
            <td class="number">{count(each.outputTokens)}</td>
            <td class="number">{money(each.money)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function ModelPanel({ found }: { found: Loaded<ModelCalls> }) {
  const calls = found.value?.calls ?? [];
  return (
    <section class="panel">
      <Failure error={found.error} />
      {found.value && !calls.length ? <p class="dim">No bridge has recorded a model call in this session.</p> : null}
      {calls.length ? <p class="dim">{modelWords(found.value!)}</p> : null}
      {calls.length ? <ModelTable totals={found.value!.totals} /> : null}
      <ol class="model-calls">
        {calls.map((each) => (
          <li key={each.callId}>
            <span class="dim number">
              <Time at={each.startedAt} />
            </span>
            <code class="untrusted">{oneLine(each.model || each.path, 60)}</code>
            <span class="number">
              {each.status >= 200 && each.status < 300 ? null : <span class="failed">✗ {each.status || "cancelled"} </span>}
              {each.estimated ? "≈ " : ""}
              {count(each.inputTokens)} → {count(each.outputTokens)}
            </span>
            <span class="number dim">{duration(each.durationSeconds)}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}
