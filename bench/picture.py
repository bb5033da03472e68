"""`python -m bench.picture FILE`: record a short session in a Holdfast terminal and draw it as an animated SVG.

The session starts a command, kills the server with SIGKILL, and reads output and exit code from the next server.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

import msgspec

import holdfast
from holdfast.client.screen.asciicast import OUTPUT, CastEvent, read_cast
from holdfast.client.screen.screen import emulator

ROWS: Final = 14
COLS: Final = 96
COMMANDS: Final = (
    "holdfast run --detach --id build -- sh -c 'for i in 1 2 3; do sleep 2; echo $i; done; exit 3'",
    "holdfast ps",
    "kill -9 $(holdfast status | awk '/^pid/ {print $2}')   # the server, not the build",
    "holdfast logs -f build",
    'holdfast wait build; echo "exit code $?"',
)
#: A pause in the recording is shown for at least and at most this many seconds.
SHORTEST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.2
#: The finished session stays on the screen for this long before the animation starts again.
FINAL_PAUSE: Final = 5.0
CHARACTER_WIDTH: Final = 8.43
LINE_HEIGHT: Final = 19
MARGIN: Final = 16
TITLE_BAR: Final = 30


class Frame(msgspec.Struct, frozen=True):
    """The lines of the screen from `start` seconds of the animation on."""

    start: float
    lines: Sequence[str]


async def record() -> str:
    """Run `COMMANDS` in a terminal and return the recording as asciicast v2."""
    with tempfile.TemporaryDirectory(prefix="holdfast-picture-") as directory:
        env = {
            "HOLDFAST_DIRECTORY": directory,
            "HOME": directory,
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        }
        async with holdfast.connect("inprocess") as box:
            await box.write_file(f"{directory}/.bashrc", "PS1='$ '\n")
            shell = await box.terminal("bash", rows=ROWS, cols=COLS, env=env, login=False)
            for command in COMMANDS:
                for character in f"{command}\n":
                    await shell.send(character)
                    await asyncio.sleep(0.02)
                await shell.wait_until_idle(timeout=60)
            recording = await shell.recording(title="holdfast")
            stop = await box.exec([sys.executable, "-m", "holdfast", "stop"], env=env)
            assert stop.success, stop.stderr
            return recording


def frames(events: Sequence[CastEvent]) -> list[Frame]:
    """The distinct screens of a recording, with long pauses shortened."""
    screen = emulator(ROWS, COLS)
    found: list[Frame] = []
    shown_at = last = 0.0
    for event in events:
        if event.code != OUTPUT:
            continue
        screen.feed(event.data)
        lines = screen.screen().lines
        if found and lines == found[-1].lines:
            continue
        shown_at += min(max(event.time - last, SHORTEST_PAUSE if b"\n" in event.data else 0.0), LONGEST_PAUSE)
        last = event.time
        found.append(Frame(round(shown_at, 2), lines))
    screen.close()
    return found


def svg(screens: Sequence[Frame]) -> str:
    """One `<text>` for each line and each time for which the line stays the same, shown and hidden by CSS."""
    total = screens[-1].start + FINAL_PAUSE
    width, height = round(COLS * CHARACTER_WIDTH + 2 * MARGIN), TITLE_BAR + ROWS * LINE_HEIGHT + MARGIN
    styles: list[str] = []
    texts: list[str] = []
    for row in range(ROWS):
        start = 0
        for end in range(1, len(screens) + 1):
            line = screens[start].lines[row]
            if end < len(screens) and screens[end].lines[row] == line:
                continue
            if line:
                since = 100 * screens[start].start / total
                until = 100 * (total if end == len(screens) else screens[end].start) / total
                name = f"t{len(texts)}"
                hidden_after = "" if end == len(screens) else f"{until:.2f}%{{opacity:0}}"
                styles.append(f"@keyframes {name}{{0%{{opacity:0}}{since:.2f}%{{opacity:1}}{hidden_after}}}")
                final = "" if end == len(screens) else ' class="gone"'
                y = TITLE_BAR + (row + 1) * LINE_HEIGHT - 5
                texts.append(f'<text{final} y="{y}" style="animation-name:{name}">{_line(line)}</text>')
            start = end
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<title>A command outlives a kill -9 of its server</title>
<style>
text{{font:14px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;fill:#c9d1d9;white-space:pre;\
animation:{total:.2f}s step-end infinite}}
.gone{{opacity:0}}
.prompt{{fill:#3fb950}}
.command{{fill:#f0f6fc;font-weight:600}}
@media (prefers-reduced-motion){{text{{animation:none}}}}
{"".join(styles)}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
<g fill="#484f58"><circle cx="20" cy="16" r="5"/><circle cx="38" cy="16" r="5"/><circle cx="56" cy="16" r="5"/></g>
<g transform="translate({MARGIN})">
{chr(10).join(texts)}
</g>
</svg>
"""


def _line(line: str) -> str:
    if not line.startswith("$"):
        return escape(line)
    return f'<tspan class="prompt">$</tspan><tspan class="command">{escape(line[1:])}</tspan>'


def main() -> int:
    cast = asyncio.run(record())
    drawn = svg(frames(list(read_cast(cast.splitlines()).events)))
    Path(sys.argv[1]).write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
