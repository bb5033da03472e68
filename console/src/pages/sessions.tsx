// The table of sessions: live, filtered by the address, a page at a time.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { call, stream } from "../api.ts";
import { duration, labelTexts, oneLine, secondsOf, size } from "../format.ts";
import { useKeys, useLoad, useNow } from "../hooks.ts";
import { Code, Copy, Empty, Failure, Skeleton, Spark, StateMark, Text } from "../parts.tsx";
import { go, Link, sessionPath, usePlace, withQuery, type Place } from "../router.tsx";
import type { Approval, State, Summary } from "../types.ts";

const OPEN: State[] = ["RUNNING", "BUSY", "IDLE", "CLOSING", "UNKNOWN"];
const CHOICES: Record<string, State[]> = { open: OPEN, busy: ["BUSY"], idle: ["IDLE"], error: ["ERROR"], closed: ["CLOSED"], all: [] };
const PAGE = 100;
// Columns that order the rows of the page; the service orders pages by age alone.
const ORDERS: Record<string, (a: Summary, b: Summary) => number> = {
  state: (a, b) => rank(a) - rank(b),
  agent: (a, b) => a.agentId.localeCompare(b.agentId),
  cpu: (a, b) => (b.usage?.cpuPercent ?? -1) - (a.usage?.cpuPercent ?? -1),
  memory: (a, b) => Number(b.usage?.memoryBytes ?? -1) - Number(a.usage?.memoryBytes ?? -1),
};
// What needs a person first, then what runs.
const rank = (each: Summary) => (each.approvals ? 0 : ["ERROR", "BUSY", "RUNNING", "IDLE", "UNKNOWN", "CLOSING", "CLOSED"].indexOf(each.state) + 1);

export type SummaryPage = { sessions: Summary[]; nextPageToken: string; counts: Record<string, number> };

export function listFields(query: URLSearchParams): object {
  const labels = Object.fromEntries(query.getAll("label").map((each) => each.split(/=(.*)/s).slice(0, 2)).filter(([name]) => name));
  return {
    states: CHOICES[query.get("state") ?? "open"] ?? OPEN,
    agentId: query.get("agent") ?? "",
    sandbox: query.get("sandbox") ?? "",
    search: query.get("q") ?? "",
    oldestFirst: query.get("sort") === "oldest",
    labels,
  };
}

export function Sessions({ approvals }: { approvals: Approval[] }) {
  const place = usePlace();
  const fields = listFields(place.query);
  const page = place.query.get("page") ?? "";
  const key = JSON.stringify([fields, page]);
  const found = useLoad<SummaryPage>(key, (signal) => call("ListSummaries", { ...fields, pageSize: PAGE, pageToken: page }, signal));
  const [changed, setChanged] = useState<Record<string, Summary>>({});
  const [fresh, setFresh] = useState<string[]>([]);
  const [chosen, setChosen] = useState(-1);
  const now = useNow();
  const table = useRef<HTMLTableSectionElement>(null);
  const search = useRef<HTMLInputElement>(null);

  useEffect(() => {
    setChanged({});
    setFresh([]);
  }, [found.value]);
  useEffect(() => setChosen(-1), [key]);

  const sort = place.query.get("sort") ?? "";
  const rows = useMemo(() => {
    const current = (found.value?.sessions ?? []).map((each) => changed[each.sessionId] ?? each);
    const order = ORDERS[sort];
    return order ? current.sort(order) : current;
  }, [found.value, changed, sort]);
  const asked = useMemo(() => new Map(approvals.map((each) => [each.sessionId, each.command])), [approvals]);
  const ids = rows.map((each) => each.sessionId).join(" ");
  const shown = useRef<Set<string>>(new Set());
  shown.current = new Set(ids ? ids.split(" ") : []);
  const reading = useRef(false);
  reading.current = chosen >= 0 || scrollY > 40 || page !== "";

  useEffect(() => {
    if (!found.value) return;
    const source = stream<{ session?: Summary; reload: boolean }>(
      "WatchSessions",
      () => ({ sessionIds: [...shown.current].slice(0, 200) }),
      ({ session, reload }) => {
        if (reload) return found.reload();
        if (!session) return;
        if (shown.current.has(session.sessionId)) setChanged((before) => ({ ...before, [session.sessionId]: session }));
        else if (OPEN.includes(session.state)) {
          // Rows do not move under a reader: new sessions wait behind a button.
          if (reading.current) setFresh((before) => (before.includes(session.sessionId) ? before : [...before, session.sessionId]));
          else found.reload();
        }
      },
    );
    return () => source.close();
  }, [key, !!found.value, ids]);

  const step = (by: number) => {
    const next = Math.min(rows.length - 1, Math.max(0, chosen + by));
    setChosen(next);
    const row = table.current?.children[next];
    row?.querySelector("a")?.focus({ preventScroll: true });
    row?.scrollIntoView({ block: "nearest" });
  };
  useKeys({
    j: () => step(1),
    k: () => step(-1),
    Enter: () => rows[chosen] && go(sessionPath(rows[chosen]!.sessionId)),
    "/": () => search.current?.focus(),
    Escape: () => setChosen(-1),
  });

  const counts = found.value?.counts ?? {};
  const open = (counts.RUNNING ?? 0) + (counts.CLOSING ?? 0) + (counts.UNKNOWN ?? 0);
  return (
    <main>
      <div class="page-head">
        <h1 class="page">Sessions</h1>
        <span class="dim counts" role="status">
          {open.toLocaleString()} open · {counts.ERROR ? <span class="failed">{counts.ERROR.toLocaleString()} in error</span> : "0 in error"} · {(counts.CLOSED ?? 0).toLocaleString()} closed
        </span>
        {ORDERS[sort] && found.value?.nextPageToken ? <span class="dim">the rows of this page are sorted</span> : null}
        {fresh.length ? (
          <button class="pill" onClick={() => (page ? go(withQuery(place, { page: "" })) : found.reload())}>
            {fresh.length} new
          </button>
        ) : null}
      </div>
      <Filters place={place} searchField={search} />
      <Failure error={found.error} retry={found.reload} />
      {!found.value && found.loading ? <Skeleton rows={8} /> : null}
      {found.value && !rows.length ? <NoSessions filtered={place.query.toString() !== ""} /> : null}
      {rows.length ? (
        <table class="sessions">
          <thead>
            <tr>
              <Heading place={place} name="State" order="state" />
              <th class="id">Session</th>
              <Heading place={place} name="Agent" order="agent" class="agent" />
              <th class="sandbox">Sandbox</th>
              <th class="command">Command</th>
              <Heading place={place} name="Age" order={sort === "oldest" ? "" : "oldest"} class="age number" sorted={sort === "oldest" ? "descending" : sort ? undefined : "ascending"} />
              <Heading place={place} name="CPU" order="cpu" class="cpu" />
              <Heading place={place} name="Memory" order="memory" class="memory number" />
              <th class="labels">Labels</th>
            </tr>
          </thead>
          <tbody ref={table}>
            {rows.map((row, index) => (
              <Row key={row.sessionId} row={row} asked={asked.get(row.sessionId)} now={now} chosen={index === chosen} place={place} />
            ))}
          </tbody>
        </table>
      ) : null}
      <nav class="pager" aria-label="Pages">
        {page ? <Link to={withQuery(place, { page: "" })}>First page</Link> : null}
        {found.value?.nextPageToken ? <Link to={withQuery(place, { page: found.value.nextPageToken })}>Next {PAGE} →</Link> : null}
      </nav>
    </main>
  );
}

// The heading of a column that orders the rows; again for the order of the service.
function Heading(props: { place: Place; name: string; order: string; class?: string; sorted?: "ascending" | "descending" | undefined }) {
  const current = props.place.query.get("sort") === props.order && props.order !== "";
  const sorted = props.sorted ?? (current ? "descending" : undefined);
  return (
    <th class={props.class} aria-sort={sorted}>
      <Link to={withQuery(props.place, { sort: current ? "" : props.order, page: "" })} class="order" title={`Order by ${props.name.toLowerCase()}`}>
        {props.name}
        <span aria-hidden="true">{sorted === "ascending" ? "▴" : sorted ? "▾" : ""}</span>
      </Link>
    </th>
  );
}

function Row({ row, asked, now, chosen, place }: { row: Summary; asked: string | undefined; now: number; chosen: boolean; place: Place }) {
  const over = row.state === "CLOSED" || row.state === "ERROR";
  const age = (over ? secondsOf(row.closedAt) : now / 1000) - secondsOf(row.createdAt);
  const labels = labelTexts(row.labels);
  return (
    <tr class={`${chosen ? "chosen" : ""} ${over ? "over" : ""}`} onClick={(event) => !(event.target as HTMLElement).closest("a") && go(sessionPath(row.sessionId))}>
      <td>
        <StateMark state={row.state} approvals={row.approvals} />
      </td>
      <td class="id">
        <Link to={sessionPath(row.sessionId)}>
          <code>{oneLine(row.sessionId, 14)}</code>
        </Link>
        {row.kind === "SHELL" ? <span class="kind">shell</span> : null}
      </td>
      <td class="agent">
        <Link to={withQuery(place, { agent: row.agentId, page: "" })} class="plain">
          <Text value={row.agentId} longest={40} />
        </Link>
      </td>
      <td class="sandbox">
        <Text value={row.sandbox} longest={40} />
      </td>
      <td class="command">
        {row.approvals && !over ? (
          <>
            <Link to="/approvals" class="asks">
              needs approval
            </Link>{" "}
            {asked ? <Code value={asked} longest={240} /> : null}
          </>
        ) : over ? (
          <span class="dim untrusted">{oneLine(row.closeReason, 80)}</span>
        ) : row.command ? (
          <>
            {row.exitCode ? <span class="failed">✗ {row.exitCode} </span> : null}
            <Code value={row.command} longest={240} />
          </>
        ) : (
          <span class="dim">—</span>
        )}
      </td>
      <td class="age number">{duration(age)}</td>
      <td class="cpu">
        {over ? null : <Spark values={row.cpuHistory} label={`CPU, now ${Math.round(row.usage?.cpuPercent ?? 0)} %`} />}
      </td>
      <td class="memory number">{row.usage && !over ? size(row.usage.memoryBytes) : ""}</td>
      <td class="labels">
        {labels.slice(0, 3).map((each) => (
          <span key={each} class="label untrusted" title={each}>
            {each}
          </span>
        ))}
        {labels.length > 3 ? <span class="dim">+{labels.length - 3}</span> : null}
      </td>
    </tr>
  );
}

function Filters({ place, searchField }: { place: Place; searchField: { current: HTMLInputElement | null } }) {
  const set = (changes: Record<string, string>) => go(withQuery(place, { ...changes, page: "" }), { replace: true });
  const without = (name: string, value: string) => {
    const query = new URLSearchParams(place.query);
    query.delete(name, value);
    query.delete("page");
    go(place.path + (query.size ? `?${query}` : ""), { replace: true });
  };
  const timer = useRef(0);
  const chips = (["agent", "sandbox", "label"] as const).flatMap((name) => place.query.getAll(name).map((value) => [name, value] as const));
  return (
    <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
      <input
        ref={searchField}
        type="search"
        placeholder="Search id, agent, sandbox, label=value"
        aria-label="Search sessions"
        defaultValue={place.query.get("q") ?? ""}
        onInput={(event) => {
          const text = event.currentTarget.value;
          clearTimeout(timer.current);
          timer.current = window.setTimeout(() => set({ q: text }), 200);
        }}
        onKeyDown={(event) => {
          if (event.key === "Escape") event.currentTarget.blur();
          if (event.key === "Enter" && /^[^=\s]+=/.test(event.currentTarget.value)) {
            const query = new URLSearchParams(place.query);
            query.delete("q");
            query.append("label", event.currentTarget.value);
            event.currentTarget.value = "";
            clearTimeout(timer.current);
            go(`${place.path}?${query}`);
          }
        }}
      />
      <select aria-label="State" value={place.query.get("state") ?? "open"} onChange={(event) => set({ state: event.currentTarget.value === "open" ? "" : event.currentTarget.value })}>
        {Object.keys(CHOICES).map((each) => (
          <option key={each} value={each}>
            {each}
          </option>
        ))}
      </select>
      <select aria-label="Order" value={place.query.get("sort") ?? ""} onChange={(event) => set({ sort: event.currentTarget.value })}>
        <option value="">newest first</option>
        <option value="oldest">oldest first</option>
        {Object.keys(ORDERS).map((each) => (
          <option key={each} value={each}>
            by {each === "cpu" ? "CPU" : each}
          </option>
        ))}
      </select>
      {chips.map(([name, value]) => (
        <button type="button" key={name + value} class="chip" onClick={() => without(name, value)} title="Remove this filter">
          {name}: <span class="untrusted">{oneLine(value, 40)}</span> ✕
        </button>
      ))}
    </form>
  );
}

function NoSessions({ filtered }: { filtered: boolean }) {
  if (filtered) {
    return (
      <Empty title="No session matches">
        <p>
          <Link to="/sessions">Remove all filters</Link>
        </p>
      </Empty>
    );
  }
  return (
    <Empty title="No session is open">
      <p>An agent opens one through the API, or you do on the command line:</p>
      <Copy text="holdfast session open" />
      <p>
        <Link to="/sessions?state=all">Show closed sessions</Link>
      </p>
    </Empty>
  );
}
