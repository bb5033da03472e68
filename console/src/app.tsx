// The frame of the page: sign in, navigation, approvals in the title, search, keys, and what the service's absence means.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, onAway, ServiceError, signedIn, signIn, signOut, stream } from "./api.ts";
import { oneLine, visible } from "./format.ts";
import { typing, useKeys, useLoad } from "./hooks.ts";
import { Copy, Dialog, StateMark } from "./parts.tsx";
import { go, Link, sessionPath, usePlace } from "./router.tsx";
import type { Approval, Caller, SessionEvent } from "./types.ts";
import { Approvals } from "./pages/approvals.tsx";
import { Audit } from "./pages/audit.tsx";
import { Fleet } from "./pages/fleet.tsx";
import { SessionPage } from "./pages/session.tsx";
import { Sessions, type SummaryPage } from "./pages/sessions.tsx";
import { Usage } from "./pages/usage.tsx";
import { Wall } from "./pages/wall.tsx";

const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

export function App() {
  const [inside, setInside] = useState(signedIn());
  const [caller, setCaller] = useState<Caller>();
  const [refusal, setRefusal] = useState("");
  useEffect(() => {
    if (!inside) return;
    let timer = 0;
    const ask = () =>
      call<Caller>("GetCaller").then(
        (found) => {
          setCaller(found);
          setRefusal("");
        },
        (error: ServiceError) => {
          setRefusal(error.words);
          if (error.transient) timer = window.setTimeout(ask, 3000);
          else {
            signOut();
            setInside(false);
          }
        },
      );
    void ask();
    return () => clearTimeout(timer);
  }, [inside]);
  const leave = () => {
    signOut();
    setCaller(undefined);
    setInside(false);
  };
  if (!inside || !caller) return <SignIn refusal={refusal} waiting={inside} onToken={() => setInside(true)} />;
  return <Frame caller={caller} onLeave={leave} />;
}

function SignIn({ refusal, waiting, onToken }: { refusal: string; waiting: boolean; onToken: () => void }) {
  const [text, setText] = useState("");
  const field = useRef<HTMLInputElement>(null);
  // The field is disabled while a token is checked, and a disabled field loses the focus.
  useEffect(() => {
    if (!waiting) field.current?.focus();
  }, [waiting]);
  return (
    <div class="sign-in">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (!text.trim()) return;
          signIn(text.trim());
          setText("");
          onToken();
        }}
      >
        <img src="/icon.svg" alt="" width="40" height="40" />
        <h1>Holdfast</h1>
        <label for="token">Token</label>
        <input id="token" ref={field} type="password" value={text} onInput={(event) => setText(event.currentTarget.value)} autocomplete="off" spellcheck={false} disabled={waiting} />
        <button class="primary" disabled={waiting}>
          {waiting ? "Signing in…" : "Sign in"}
        </button>
        {refusal ? (
          <p class="failed untrusted" role="alert">
            {visible(refusal)}
          </p>
        ) : null}
        <p class="dim">
          An operator sees all sessions, an agent its own. The token stays in this tab.
        </p>
        <p class="dim">A new one for an agent:</p>
        <Copy text="holdfast service agent add NAME" />
      </form>
    </div>
  );
}

function Frame({ caller, onLeave }: { caller: Caller; onLeave: () => void }) {
  const place = usePlace();
  const [help, setHelp] = useState(false);
  const [search, setSearch] = useState(false);
  const [away, setAway] = useState(false);
  const [theme, setTheme] = useTheme();
  const approvals = useLoad<{ approvals: Approval[] }>("approvals", (signal) => call("ListApprovals", {}, signal));
  const waiting = approvals.value?.approvals.length ?? 0;
  const [sound, setSound] = useSound(waiting);
  const totals = useLoad<SummaryPage>("counts", (signal) => call("ListSummaries", { pageSize: 1 }, signal));
  const counts = totals.value?.counts ?? {};
  const open = (counts.RUNNING ?? 0) + (counts.CLOSING ?? 0) + (counts.UNKNOWN ?? 0);
  const prefix = useRef("");
  useEffect(() => onAway(setAway), []);
  useEffect(() => {
    let since = "";
    let timer = 0;
    const types = ["APPROVAL_REQUESTED", "APPROVAL_ANSWERED", "SESSION_CREATED", "SESSION_CLOSED", "SESSION_ERROR"];
    const events = stream<SessionEvent>("SubscribeSessionEvents", () => ({ since, types }), (event) => {
      since = event.token;
      if (event.type !== "SESSION_CREATED") approvals.reload();
      // A thousand sessions that are opened at once are counted once.
      if (event.type.startsWith("SESSION")) {
        clearTimeout(timer);
        timer = window.setTimeout(totals.reload, 500);
      }
    });
    return () => {
      clearTimeout(timer);
      events.close();
    };
  }, []);
  useEffect(() => {
    document.title = (waiting ? `(${waiting}) ` : "") + "Holdfast";
  }, [waiting]);
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && !(event.target as HTMLElement).closest?.(".terminal-box.typing")) {
        event.preventDefault();
        return setSearch(true);
      }
      if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (prefix.current === "g") {
        const to = { s: "/sessions", a: "/approvals", w: "/wall", f: "/fleet", u: "/usage", l: "/audit" }[event.key];
        prefix.current = "";
        if (to) {
          event.preventDefault();
          event.stopImmediatePropagation();
          go(to);
        }
        return;
      }
      if (event.key === "g") {
        prefix.current = "g";
        event.stopImmediatePropagation();
        setTimeout(() => (prefix.current = ""), 1500);
      }
    };
    addEventListener("keydown", pressed, { capture: true });
    return () => removeEventListener("keydown", pressed, { capture: true });
  }, []);
  useKeys({ "?": () => setHelp(true) });

  const pages: [string, string, boolean][] = [
    ["/sessions", "Sessions", true],
    ["/wall", "Wall", true],
    ["/fleet", "Fleet", caller.role === "operator"],
    ["/approvals", "Approvals", true],
    ["/audit", "Audit", true],
    ["/usage", "Usage", true],
  ];
  const session = /^\/sessions\/([^/]+)$/.exec(place.path);
  const at = place.path === "/" ? "/sessions" : place.path;
  return (
    <>
      <header class="bar">
        <Link to="/sessions" class="brand">
          <img src="/icon.svg" alt="" width="20" height="20" /> <span>Holdfast</span>
        </Link>
        <nav aria-label="Pages" ref={(nav) => nav?.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" })}>
          {pages
            .filter(([, , allowed]) => allowed)
            .map(([path, name]) => (
              <Link key={path} to={path} current={at === path || (path === "/sessions" && !!session)}>
                {name}
                {path === "/sessions" && open ? <span class="tally">{open.toLocaleString()}</span> : null}
                {path === "/approvals" && waiting ? <span class="badge">{waiting}</span> : null}
              </Link>
            ))}
        </nav>
        <span class="grow" />
        <button class="search-button" onClick={() => setSearch(true)} aria-label="Search">
          <span>Search</span> <kbd>Ctrl K</kbd>
        </button>
        <button class="quiet" onClick={() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]!)} title={`Colours: ${theme}`} aria-label={`Colours: ${theme}`}>
          <ThemeMark theme={theme} />
        </button>
        <span class="who" title={`Holdfast ${caller.version}`}>
          <b class="untrusted">{oneLine(caller.agentId, 30)}</b> {caller.agentId === caller.role ? null : <span class="dim">{caller.role}</span>}
        </span>
        <button class="quiet" id="leave" onClick={onLeave}>
          Sign out
        </button>
      </header>
      {away ? (
        <div class="away" role="alert">
          The service does not answer. This is the last known state; the page tries again every 3 s.
        </div>
      ) : null}
      <div class={away ? "stale" : ""}>
        {session ? (
          <SessionPage key={session[1]} id={decodeURIComponent(session[1]!)} caller={caller} />
        ) : at === "/sessions" ? (
          <Sessions approvals={approvals.value?.approvals ?? []} />
        ) : at === "/wall" ? (
          <Wall approvals={approvals.value?.approvals ?? []} />
        ) : at === "/fleet" ? (
          <Fleet />
        ) : at === "/approvals" ? (
          <Approvals approvals={approvals.value?.approvals} error={approvals.error} reload={approvals.reload} sound={sound} onSound={setSound} />
        ) : at === "/audit" ? (
          <Audit caller={caller} />
        ) : at === "/usage" ? (
          <Usage caller={caller} />
        ) : (
          <main>
            <div class="empty">
              <strong>No such page</strong>
              <p>
                <Link to="/sessions">All sessions</Link>
              </p>
            </div>
          </main>
        )}
      </div>
      {help ? <Help onClose={() => setHelp(false)} /> : null}
      {search ? <Palette pages={pages.filter(([, , allowed]) => allowed).map(([path, name]) => [path, name])} onClose={() => setSearch(false)} /> : null}
    </>
  );
}

function ThemeMark({ theme }: { theme: Theme }) {
  return (
    <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true" class="theme-mark">
      {theme === "dark" ? (
        <path d="M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3z" fill="currentColor" />
      ) : (
        <>
          <circle cx="8" cy="8" r={theme === "light" ? 3 : 5.5} fill={theme === "light" ? "currentColor" : "none"} stroke="currentColor" stroke-width="1.5" />
          {theme === "light" ? (
            <path d="M8 .8v2M8 13.2v2M.8 8h2M13.2 8h2M2.9 2.9l1.4 1.4M11.7 11.7l1.4 1.4M2.9 13.1l1.4-1.4M11.7 4.3l1.4-1.4" stroke="currentColor" stroke-width="1.5" />
          ) : (
            <path d="M8 2.5a5.5 5.5 0 0 0 0 11z" fill="currentColor" />
          )}
        </>
      )}
    </svg>
  );
}

// A short tone when another command waits for an approval; off until the reader turns it on.
function useSound(waiting: number): [boolean, (on: boolean) => void] {
  const [on, setOn] = useState(localStorage.getItem("holdfast-sound") === "on");
  const before = useRef(waiting);
  useEffect(() => {
    if (on && waiting > before.current) tone();
    before.current = waiting;
  }, [waiting, on]);
  return [
    on,
    (next) => {
      setOn(next);
      if (next) {
        localStorage.setItem("holdfast-sound", "on");
        tone();
      } else localStorage.removeItem("holdfast-sound");
    },
  ];
}

function tone(): void {
  const audio = new AudioContext();
  const source = audio.createOscillator();
  const volume = audio.createGain();
  source.frequency.value = 660;
  volume.gain.setValueAtTime(0.08, audio.currentTime);
  volume.gain.exponentialRampToValueAtTime(0.001, audio.currentTime + 0.35);
  source.connect(volume).connect(audio.destination);
  source.start();
  source.stop(audio.currentTime + 0.35);
  source.onended = () => void audio.close();
}

// Kept only if the reader chooses a theme: otherwise the page stores nothing outside of its tab.
function useTheme(): [Theme, (theme: Theme) => void] {
  const stored = localStorage.getItem("holdfast-theme");
  const [theme, setTheme] = useState<Theme>(THEMES.find((each) => each === stored) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  return [
    theme,
    (next) => {
      setTheme(next);
      if (next === "auto") localStorage.removeItem("holdfast-theme");
      else localStorage.setItem("holdfast-theme", next);
    },
  ];
}

function Palette({ pages, onClose }: { pages: string[][]; onClose: () => void }) {
  const [text, setText] = useState("");
  const [chosen, setChosen] = useState(0);
  const found = useLoad<SummaryPage>(`palette ${text}`, (signal) =>
    text.trim() ? call("ListSummaries", { search: text.trim(), pageSize: 8 }, signal) : Promise.resolve({ sessions: [], nextPageToken: "", counts: {} }),
  );
  const wanted = text.trim().toLowerCase();
  const choices: { to: string; content: preact.ComponentChildren }[] = [
    ...pages.filter(([, name]) => name!.toLowerCase().includes(wanted)).map(([path, name]) => ({ to: path!, content: <span>{name}</span> })),
    ...(found.value?.sessions ?? []).map((each) => ({
      to: sessionPath(each.sessionId),
      content: (
        <>
          <StateMark state={each.state} approvals={each.approvals} />
          <code>{oneLine(each.sessionId, 14)}</code> <span class="untrusted">{oneLine(each.agentId, 30)}</span>{" "}
          <span class="dim untrusted">{oneLine(each.command || Object.entries(each.labels).map((pair) => pair.join("=")).join(" "), 60)}</span>
        </>
      ),
    })),
  ];
  const open = (index: number) => {
    const choice = choices[index];
    if (choice) {
      onClose();
      go(choice.to);
    }
  };
  return (
    <Dialog title="Search" onClose={onClose}>
      <input
        class="palette"
        autofocus
        aria-label="Search sessions and pages"
        placeholder="A session, an agent, label=value, or a page"
        value={text}
        onInput={(event) => {
          setText(event.currentTarget.value);
          setChosen(0);
        }}
        onKeyDown={(event) => {
          if (event.key === "ArrowDown") setChosen(Math.min(choices.length - 1, chosen + 1));
          else if (event.key === "ArrowUp") setChosen(Math.max(0, chosen - 1));
          else if (event.key === "Enter") open(chosen);
          else return;
          event.preventDefault();
        }}
      />
      <ul class="choices" role="listbox">
        {choices.map((choice, index) => (
          <li key={choice.to} role="option" aria-selected={index === chosen} onPointerMove={() => setChosen(index)} onClick={() => open(index)}>
            {choice.content}
          </li>
        ))}
        {!choices.length ? <li class="dim">{found.loading ? "Searching…" : "Nothing found"}</li> : null}
      </ul>
    </Dialog>
  );
}

const KEYS: [string, string][] = [
  ["j  k", "next and previous row"],
  ["Enter", "open the row"],
  ["/", "filter the list"],
  ["Ctrl K", "search everywhere"],
  ["g s", "sessions"],
  ["g a", "approvals"],
  ["g w", "wall"],
  ["g f", "fleet"],
  ["g l", "audit"],
  ["g u", "usage"],
  ["a  r", "allow, refuse (twice)"],
  ["t", "take a terminal over"],
  ["Ctrl Shift L", "stop typing into it"],
  ["p  l", "replay, back to live"],
  ["Space", "play, pause"],
  ["←  →", "five seconds back, on"],
  ["<  >", "slower, faster"],
  ["?", "this list"],
];

function Help({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keys" onClose={onClose}>
      <dl class="keys">
        {KEYS.map(([key, words]) => (
          <>
            <dt key={key}>
              {key.split(/\s{2}/).map((each) => (
                <kbd key={each}>{each}</kbd>
              ))}
            </dt>
            <dd>{words}</dd>
          </>
        ))}
      </dl>
    </Dialog>
  );
}
