// Thumbnails of the terminals that are open now.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Terminal } from "@xterm/xterm";
import { call, fromBase64 } from "../api.ts";
import { duration, oneLine, secondsOf } from "../format.ts";
import { useLoad, useNow } from "../hooks.ts";
import { Empty, Failure, Skeleton, StateMark, Text } from "../parts.tsx";
import { Link, sessionPath } from "../router.tsx";
import type { Approval, Summary } from "../types.ts";
import { BACKGROUND, FOREGROUND, makeTerminal, MONOSPACE, PALETTE, write } from "../xterm.ts";
import type { SummaryPage } from "./sessions.tsx";

const MOST = 48;
// A screen is small text: twice in five seconds is enough to see what moves.
const EVERY_MS = 2500;
type Screen = { sessionId: string; cols: number; rows: number; drawing: string; problem: string };

export function Wall({ approvals }: { approvals: Approval[] }) {
  const found = useLoad<SummaryPage>("wall", (signal) =>
    call("ListSummaries", { states: ["RUNNING", "BUSY", "IDLE"], pageSize: 200 }, signal),
  );
  const [screens, setScreens] = useState<Record<string, Screen>>({});
  const terminals = (found.value?.sessions ?? []).filter((each) => each.kind === "TERMINAL").slice(0, MOST);
  const ids = terminals.map((each) => each.sessionId).join(" ");
  const now = useNow();
  useEffect(() => {
    if (!ids) return;
    let timer = 0;
    let over = false;
    const refresh = async () => {
      if (!document.hidden) {
        const reply = await call<{ screens: Screen[] }>("GetScreens", { sessionIds: ids.split(" ") }).catch(() => undefined);
        if (over) return;
        if (reply) setScreens(Object.fromEntries(reply.screens.map((each) => [each.sessionId, each])));
      }
      timer = window.setTimeout(refresh, EVERY_MS);
    };
    void refresh();
    const again = setInterval(found.reload, 4 * EVERY_MS);
    return () => {
      over = true;
      clearTimeout(timer);
      clearInterval(again);
    };
  }, [ids]);
  return (
    <main>
      <div class="page-head">
        <h1 class="page">Wall</h1>
        <span class="dim">{found.value ? `${terminals.length} ${terminals.length === 1 ? "terminal" : "terminals"}${terminals.length === MOST ? ", the newest" : ""}` : ""}</span>
      </div>
      <Failure error={found.error} retry={found.reload} />
      {!found.value && found.loading ? <Skeleton rows={4} /> : null}
      {found.value && !terminals.length ? <Empty title="No terminal is open">Shells without a terminal are in the list of sessions.</Empty> : null}
      <div class="wall">
        {terminals.map((each) => (
          <Thumbnail key={each.sessionId} session={each} screen={screens[each.sessionId]} asked={approvals.find((one) => one.sessionId === each.sessionId)?.command} now={now} />
        ))}
      </div>
    </main>
  );
}

function Thumbnail({ session, screen, asked, now }: { session: Summary; screen: Screen | undefined; asked: string | undefined; now: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const drawing = screen?.drawing;
  useEffect(() => {
    if (screen && canvas.current && !screen.problem) void paint(canvas.current, screen);
  }, [drawing, screen?.cols]);
  return (
    <Link to={sessionPath(session.sessionId)} class="thumbnail">
      <canvas ref={canvas} width="720" height="450" role="img" aria-label={`Screen of ${session.sessionId}`} />
      {!screen ? <p class="over-canvas">Drawing…</p> : null}
      {screen?.problem ? <p class="untrusted over-canvas">{oneLine(screen.problem, 120)}</p> : null}
      <div>
        <StateMark state={session.state} approvals={session.approvals} />
        <Text value={session.agentId} longest={24} />
        <code class="dim untrusted command">{oneLine(asked || session.command || session.sessionId.slice(0, 12), 80)}</code>
        <span class="dim number">{duration(now / 1000 - secondsOf(session.createdAt))}</span>
      </div>
    </Link>
  );
}

async function paint(canvas: HTMLCanvasElement, screen: Screen): Promise<void> {
  const { terminal, dispose } = makeTerminal({ cols: screen.cols, rows: screen.rows, scrollback: 0, allowProposedApi: true });
  try {
    await write(terminal, fromBase64(screen.drawing));
    draw(canvas, terminal);
  } finally {
    dispose();
  }
}

function draw(canvas: HTMLCanvasElement, terminal: Terminal): void {
  const [cellWidth, cellHeight] = [7.2, 15];
  // Not wider than a usual terminal needs, and the last lines of a high one: text stays legible.
  const cols = terminal.cols;
  const rows = terminal.rows;
  canvas.width = Math.ceil(cols * cellWidth);
  canvas.height = Math.ceil(rows * cellHeight);
  const context = canvas.getContext("2d")!;
  context.fillStyle = BACKGROUND;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.textBaseline = "top";
  context.font = `12px ${MONOSPACE}`;
  const buffer = terminal.buffer.active;
  for (let y = 0; y < rows; y++) {
    const line = buffer.getLine(buffer.baseY + y);
    if (!line) continue;
    for (let x = 0; x < cols; x++) {
      const cell = line.getCell(x);
      if (!cell || !cell.getWidth()) continue;
      let fore = colour(cell.isFgRGB(), cell.isFgPalette(), cell.getFgColor(), FOREGROUND);
      let back = colour(cell.isBgRGB(), cell.isBgPalette(), cell.getBgColor(), BACKGROUND);
      if (cell.isInverse()) [fore, back] = [back, fore];
      if (back !== BACKGROUND) {
        context.fillStyle = back;
        context.fillRect(x * cellWidth, y * cellHeight, cellWidth * cell.getWidth() + 0.5, cellHeight);
      }
      const text = cell.getChars();
      if (text && text !== " ") {
        context.fillStyle = fore;
        context.fillText(text, x * cellWidth, y * cellHeight + 1);
      }
    }
  }
}

function colour(rgb: boolean, palette: boolean, value: number, otherwise: string): string {
  if (rgb) return `#${value.toString(16).padStart(6, "0")}`;
  if (!palette) return otherwise;
  if (value < 16) return PALETTE[value]!;
  if (value >= 232) return `rgb(${Array(3).fill(8 + 10 * (value - 232)).join(",")})`;
  const steps = [0, 95, 135, 175, 215, 255];
  const cube = value - 16;
  return `rgb(${steps[Math.floor(cube / 36)]},${steps[Math.floor(cube / 6) % 6]},${steps[cube % 6]})`;
}
