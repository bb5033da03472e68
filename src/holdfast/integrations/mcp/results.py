"""Structured results of the tools. Their schemas are the `outputSchema` that clients read."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, Field

#: Bytes of output or content in a result, which has them twice, as JSON and as text. Clients of the SDK read
#: messages of at most 1 MiB.
MAX_RESULT_BYTES: Final = 128 * 1024


class CommandOutput(BaseModel):
    """The output of a command since the previous call, and how it ended."""

    session_id: Annotated[
        int | None, Field(description="For write_stdin while the command runs; null once it ended.")
    ]
    exit_code: Annotated[int | None, Field(description="null while the command runs.")]
    output: str
    omitted_bytes: Annotated[int, Field(description="Bytes left out between the head and the tail of the output.")]
    oom: Annotated[bool, Field(description="The kernel killed the command for memory.")]
    wall_time: Annotated[float, Field(description="Seconds that the call took.")]
    process_id: Annotated[str, Field(description="For the process tools, also after the end.")]


class ProcessStatus(BaseModel):
    """A process of the sandbox."""

    process_id: str
    command: list[str]
    cwd: str
    tty: bool
    running: bool
    exit_code: int | None
    signal: str | None
    started_at: Annotated[float, Field(description="Seconds since 1970.")]
    output_bytes: int
    log: Annotated[str, Field(description="The URI of the resource with its output.")]


class ProcessList(BaseModel):
    processes: list[ProcessStatus]


class ProcessOutput(BaseModel):
    """A part of the output of a process."""

    output: str
    next_position: Annotated[int, Field(description="The value of `since` for the output after this part.")]
    omitted_bytes: Annotated[int, Field(description="Bytes before this part that are no longer kept.")]
    running: bool
    exit_code: int | None


class ProcessEnd(BaseModel):
    """How a process ended, or that it still runs."""

    running: bool
    exit_code: int | None
    signal: str | None
    oom: Annotated[bool, Field(description="The kernel killed it for memory.")]


class Killed(BaseModel):
    was_running: bool


class TerminalScreen(BaseModel):
    """The screen of a terminal."""

    terminal_id: str
    lines: Annotated[list[str], Field(description="The lines of the screen, without those after the last text.")]
    cursor_row: Annotated[int, Field(description="Counted from 0.")]
    cursor_col: int
    rows: int
    cols: int
    title: str
    state: Annotated[str, Field(description="IDLE at the prompt, BUSY while a command runs, CLOSED at the end …")]
    awaiting_input: Annotated[bool | None, Field(description="Whether the foreground program reads the terminal.")]


class TerminalClosed(BaseModel):
    exit_code: int | None


class FileContent(BaseModel):
    """Content of a file."""

    content: str
    encoding: Annotated[str, Field(description="utf-8, or base64 if the bytes are no text.")]
    first_line: Annotated[int, Field(description="The number of the first line of `content`; 0 with base64.")]
    truncated: Annotated[bool, Field(description="Whether the file has more after `content`.")]
    size: Annotated[int, Field(description="Bytes of the whole file.")]


class FileChanged(BaseModel):
    path: str
    size: Annotated[int, Field(description="Bytes of the whole file now.")]


class FileEntry(BaseModel):
    name: str
    type: str
    size: int


class Listing(BaseModel):
    entries: list[FileEntry]
    truncated: bool


class SearchHit(BaseModel):
    path: str
    line: int
    text: str


class SearchHits(BaseModel):
    hits: list[SearchHit]
    truncated: bool


class SandboxStatus(BaseModel):
    """A sandbox of this connection."""

    sandbox: Annotated[str, Field(description="The name for the parameter `sandbox` of other tools.")]
    state: Annotated[str, Field(description="ready, opening or failed.")]


class SandboxList(BaseModel):
    sandboxes: list[SandboxStatus]
