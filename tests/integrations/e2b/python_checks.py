"""Checks of the Python SDK that run for `Sandbox` and `AsyncSandbox`: every public method, over any engine.

The methods of both classes have the same names and arguments; `value` awaits the results of the second.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    RateLimitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import PtySize

KINDS = pytest.mark.parametrize("kind", [Sandbox, AsyncSandbox])


async def value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


@pytest.fixture(scope="module", params=[Sandbox, AsyncSandbox], ids=["sync", "async"])
def box(request: pytest.FixtureRequest, server: Any) -> Iterator[Any]:
    """A sandbox that tests share: they leave no running commands."""

    async def make() -> Any:
        return await value(request.param.create(envs={"GIVEN": "variable"}, timeout=3_600))

    async def end() -> None:
        await value(made.kill())

    made = asyncio.run(make())
    yield made
    asyncio.run(end())


@pytest.fixture(params=[Sandbox, AsyncSandbox], ids=["sync", "async"])
async def own(request: pytest.FixtureRequest, server: Any) -> AsyncIterator[Any]:
    """A sandbox for one test."""
    made = await value(
        request.param.create(envs={"GIVEN": "variable"}, metadata={"suite": "one & two"}, timeout=600)
    )
    yield made
    await value(made.kill())


def is_async(box: Any) -> bool:
    return isinstance(box, AsyncSandbox)


# --- commands ---------------------------------------------------------------------------------------------------


async def test_a_command_has_output_directory_variables_and_an_exit_code(box: Any) -> None:
    out: list[str] = []
    errors: list[str] = []
    done = await value(
        box.commands.run(
            "echo $GIVEN $MORE; pwd; echo wrong >&2",
            envs={"MORE": "here"},
            cwd="/tmp",
            on_stdout=out.append,
            on_stderr=errors.append,
        )
    )

    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("variable here\n/tmp\n", "wrong\n", 0, None)
    assert "".join(out) == done.stdout
    assert "".join(errors) == "wrong\n"
    with pytest.raises(CommandExitException) as raised:
        await value(box.commands.run("echo partial; exit 7"))
    assert (raised.value.exit_code, raised.value.stdout) == (7, "partial\n")


async def test_errors_of_a_command_have_the_classes_of_the_sdk(box: Any) -> None:
    with pytest.raises(AuthenticationException, match="nonexistent-user"):
        await value(box.commands.run("true", user="nonexistent-user"))
    with pytest.raises(InvalidArgumentException, match="/no/such/place"):
        await value(box.commands.run("true", cwd="/no/such/place"))
    with pytest.raises(TimeoutException):
        await value(box.commands.run("sleep 600", timeout=0.5))


async def test_the_timeout_of_a_command_ends_it_also_if_its_client_has_left(box: Any) -> None:
    for timeout in (1, 10, 60):
        try:
            handle = await value(box.commands.run("sleep 600", background=True, timeout=timeout))
            break
        except TimeoutException:
            continue  # a loaded machine: the start took longer
    again = await value(box.commands.connect(handle.pid, timeout=0))
    await value(handle.disconnect())
    with pytest.raises(CommandExitException) as raised:
        await value(again.wait())
    assert raised.value.error == "signal: killed"


async def test_a_background_command_is_listed_gets_input_and_is_killed(box: Any) -> None:
    handle = await value(box.commands.run("cat; echo end", background=True, stdin=True, timeout=120))
    (listed,) = await value(box.commands.list())
    assert (listed.pid, listed.cmd, listed.args) == (handle.pid, "/bin/bash", ["-l", "-c", "cat; echo end"])

    await value(box.commands.send_stdin(handle.pid, "one\n"))
    if is_async(box):
        async with box.commands.stream_input(handle.pid) as stream:
            await stream.send("two\n")
            await stream.send(b"three\n")
    else:
        box.commands.stream_input(handle.pid, ["two\n", b"three\n"])
    await value(box.commands.close_stdin(handle.pid))
    done = await value(handle.wait())
    assert done.stdout == "one\ntwo\nthree\nend\n"

    sleeping = await value(box.commands.run("echo awake; sleep 600", background=True, timeout=0))
    assert await value(box.commands.kill(sleeping.pid)) is True
    assert await value(box.commands.kill(sleeping.pid)) is False
    with pytest.raises(CommandExitException) as raised:
        await value(sleeping.wait())
    assert (raised.value.exit_code, raised.value.error) == (-1, "signal: killed")


async def test_a_handle_has_input_and_kill_of_its_own(box: Any) -> None:
    handle = await value(box.commands.run("read line; echo got $line; sleep 600", background=True, stdin=True))
    await value(handle.send_stdin("input\n"))
    await value(handle.close_stdin())
    assert await value(handle.kill()) is True
    with pytest.raises(CommandExitException) as raised:
        await value(handle.wait())
    assert raised.value.exit_code == -1


async def test_a_process_that_was_left_has_all_its_output_by_pid(box: Any) -> None:
    handle = await value(box.commands.run("echo before; read go; echo after", background=True, stdin=True))
    await value(handle.disconnect())
    again = await value(box.commands.connect(handle.pid))
    await value(box.commands.send_stdin(handle.pid, "go\n"))
    done = await value(again.wait())
    assert done.stdout == "before\nafter\n"
    # Also after its end.
    ended = await value(box.commands.connect(handle.pid))
    assert (await value(ended.wait())).stdout == "before\nafter\n"
    with pytest.raises(NotFoundException):
        await value(box.commands.connect(4_000_000))


# --- terminals --------------------------------------------------------------------------------------------------


async def test_a_terminal_has_a_size_input_and_a_second_reader(box: Any) -> None:
    printed = bytearray()
    size = PtySize(rows=30, cols=100)
    if is_async(box):
        handle = await box.pty.create(size, on_data=printed.extend, cwd="/tmp", envs={"A": "b"})
    else:
        handle = box.pty.create(size, cwd="/tmp", envs={"A": "b"})
    await value(box.pty.send_stdin(handle.pid, b"stty size; echo $A $PWD\n"))
    await value(box.pty.resize(handle.pid, PtySize(rows=40, cols=120)))
    if is_async(box):
        async with box.pty.stream_input(handle.pid) as stream:
            await stream.send(b"stty size; exit 4\n")
    else:
        box.pty.stream_input(handle.pid, [b"stty size; exit 4\n"])
    with pytest.raises(CommandExitException) as raised:
        await value(handle.wait() if is_async(box) else handle.wait(on_pty=printed.extend))
    assert raised.value.exit_code == 4
    text = printed.decode()
    assert "b /tmp" in text
    assert "40 120" in text

    again = bytearray()
    if is_async(box):
        second = await box.pty.connect(handle.pid, on_data=again.extend)
    else:
        second = box.pty.connect(handle.pid)
    with pytest.raises(CommandExitException):
        await value(second.wait() if is_async(box) else second.wait(on_pty=again.extend))
    assert bytes(again) == bytes(printed)


async def test_a_terminal_can_be_killed(box: Any) -> None:
    arguments = {"on_data": lambda _: None} if is_async(box) else {}
    handle = await value(box.pty.create(PtySize(rows=24, cols=80), **arguments))
    assert await value(box.pty.kill(handle.pid)) is True
    assert await value(box.pty.kill(handle.pid)) is False


# --- files ------------------------------------------------------------------------------------------------------


async def test_files_are_written_and_read_in_every_form(box: Any) -> None:
    written = await value(box.files.write("below/a directory/text.txt", "text é"))
    assert (written.name, written.type) == ("text.txt", FileType.FILE)
    assert await value(box.files.read(written.path)) == "text é"

    data = bytes(range(256)) * 20_000
    await value(box.files.write("/tmp/bytes", data))
    assert await value(box.files.read("/tmp/bytes", format="bytes")) == data
    await value(box.files.write("/tmp/stream", io.BytesIO(data)))
    await value(box.files.write("/tmp/gzip", data, gzip=True))
    await value(box.files.write("/tmp/octets", data, use_octet_stream=True))
    assert await value(box.files.read("/tmp/gzip", format="bytes", gzip=True)) == data
    stream = await value(box.files.read("/tmp/stream", format="stream"))
    pieces = [piece async for piece in stream] if is_async(box) else list(stream)
    assert b"".join(pieces) == data
    assert await value(box.files.read("/tmp/octets", format="bytes")) == data

    many = await value(
        box.files.write_files([{"path": "/tmp/many/é 1", "data": "one"}, {"path": "/tmp/many/2", "data": b"two"}])
    )
    assert [each.path for each in many] == ["/tmp/many/é 1", "/tmp/many/2"]
    assert await value(box.files.read("/tmp/many/é 1")) == "one"
    await value(box.files.write("/tmp/empty", ""))
    assert await value(box.files.read("/tmp/empty")) == ""


async def test_directories_are_made_listed_moved_and_removed(box: Any) -> None:
    assert await value(box.files.make_dir("/tmp/top/below")) is True
    assert await value(box.files.make_dir("/tmp/top/below")) is False
    await value(box.files.write("/tmp/top/below/file", "x" * 10))
    await value(box.commands.run("ln -s below/file /tmp/top/link; chmod 640 /tmp/top/below/file"))

    shallow = await value(box.files.list("/tmp/top"))
    assert [(each.name, each.type) for each in shallow] == [("below", FileType.DIR), ("link", FileType.SYMLINK)]
    deep = await value(box.files.list("/tmp/top", depth=2))
    assert [each.path for each in deep] == ["/tmp/top/below", "/tmp/top/below/file", "/tmp/top/link"]
    info = await value(box.files.get_info("/tmp/top/below/file"))
    assert (info.size, info.mode, info.permissions, info.owner) == (10, 0o640, "-rw-r-----", "root")
    assert (await value(box.files.get_info("/tmp/top/link"))).symlink_target == "below/file"

    moved = await value(box.files.rename("/tmp/top/below", "/tmp/top/beyond"))
    assert moved.path == "/tmp/top/beyond"
    assert await value(box.files.exists("/tmp/top/beyond/file")) is True
    assert await value(box.files.exists("/tmp/top/below")) is False
    await value(box.files.remove("/tmp/top"))
    assert await value(box.files.exists("/tmp/top")) is False


async def test_changes_of_a_directory_are_reported(box: Any) -> None:
    await value(box.files.make_dir("/tmp/watched/below"))
    seen: list[Any] = []
    arrived = asyncio.Event()

    def saw(event: Any) -> None:
        seen.append(event)
        if event.name == "below/last":
            arrived.set()

    options = {"recursive": True, "include_entry": True}
    if is_async(box):
        handle = await box.files.watch_dir("/tmp/watched", saw, timeout=0, **options)
    else:
        handle = box.files.watch_dir("/tmp/watched", **options)
    await value(box.commands.run("cd /tmp/watched; echo x > new; chmod 600 new; mv new renamed; rm renamed"))
    await value(box.files.write("/tmp/watched/uploaded", "x"))
    await value(box.commands.run("mkdir /tmp/watched/below/last"))
    if is_async(box):
        async with asyncio.timeout(60):
            await arrived.wait()
    else:
        while not arrived.is_set():
            for each in handle.get_new_events():
                saw(each)
    await value(handle.stop())

    found = [(each.type.value, each.name) for each in seen]
    for expected in (
        ("create", "new"),
        ("write", "new"),
        ("chmod", "new"),
        ("rename", "new"),
        ("create", "renamed"),
        ("remove", "renamed"),
        ("write", "uploaded"),
        ("create", "below/last"),
    ):
        assert expected in found
    assert not [name for _, name in found if ".holdfast" in name]
    (entry,) = [each.entry for each in seen if each.name == "below/last" and each.type.value == "create"]
    assert entry.type == FileType.DIR
    with pytest.raises(FileNotFoundException):
        await value(box.files.watch_dir("/tmp/missing", *((saw,) if is_async(box) else ())))


async def test_errors_of_files_have_the_classes_of_the_sdk(box: Any) -> None:
    with pytest.raises(FileNotFoundException):
        await value(box.files.read("/tmp/missing"))
    with pytest.raises(FileNotFoundException):
        await value(box.files.list("/tmp/missing"))
    with pytest.raises(FileNotFoundException):
        await value(box.files.rename("/tmp/missing", "/tmp/other"))
    with pytest.raises(InvalidArgumentException):
        await value(box.files.read("/tmp"))
    with pytest.raises(AuthenticationException):
        await value(box.files.read("file", user="nonexistent-user"))
    with pytest.raises(InvalidArgumentException, match="metadata"):
        await value(box.files.write("/tmp/file", "x", metadata={"key": "value"}))


async def test_signed_urls_give_one_file_until_they_expire(box: Any) -> None:
    upload, download = box.upload_url("/tmp/signed"), box.download_url("/tmp/signed", use_signature_expiration=600)
    boundary = "signed-url-boundary"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="signed"\r\n\r\n'
    body = f"{head}by url\r\n--{boundary}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(upload, body, kind))
    answer = await asyncio.to_thread(urllib.request.urlopen, download)
    assert answer.read() == b"by url"
    for wrong in (download.replace("signed", "other", 1), box.download_url("/x", use_signature_expiration=-10)):
        with pytest.raises(urllib.error.HTTPError) as raised:
            await asyncio.to_thread(urllib.request.urlopen, wrong)
        assert raised.value.code == 401
        raised.value.close()


# --- sandboxes --------------------------------------------------------------------------------------------------


async def test_a_sandbox_is_described_found_and_ended(own: Any) -> None:
    kind = type(own)
    info = await value(own.get_info())
    assert (info.sandbox_id, info.template_id, info.state) == (own.sandbox_id, "base", SandboxState.RUNNING)
    assert info.metadata == {"suite": "one & two"}
    assert await value(own.is_running()) is True

    before = info.end_at
    await value(own.set_timeout(1_200))
    assert (await value(own.get_info())).end_at > before
    await value(own.set_timeout(300))
    assert (await value(kind.get_info(own.sandbox_id))).end_at < before

    (sample,) = await value(own.get_metrics())
    assert sample.cpu_count >= 1
    assert sample.mem_total > 0
    found = kind.list(query=SandboxQuery(metadata={"suite": "one & two"}, state=[SandboxState.RUNNING]))
    assert [each.sandbox_id for each in await value(found.next_items())] == [own.sandbox_id]
    none = kind.list(query=SandboxQuery(metadata={"suite": "another"}))
    assert await value(none.next_items()) == []

    same = await value(kind.connect(own.sandbox_id))
    assert (await value(same.commands.run("echo $GIVEN"))).stdout == "variable\n"
    with pytest.raises(SandboxNotFoundException):
        await value(kind.connect("holdfast-aaaaaaaaaaaaaaaa"))
    assert await value(own.kill()) is True
    assert await value(own.kill()) is False
    assert await value(own.is_running()) is False
    for call in (lambda: own.commands.run("true"), lambda: own.files.read("x")):
        with pytest.raises(SandboxNotRunningException):
            await value(call())


@KINDS
async def test_a_list_has_pages_in_the_order_of_creation(kind: Any, server: Any) -> None:
    made = [await value(kind.create(metadata={"page": kind.__name__})) for _ in range(3)]
    ids = [each.sandbox_id for each in made]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        pages = kind.list(query=SandboxQuery(metadata={"page": kind.__name__}), limit=2, order=order)
        found = [each.sandbox_id for each in await value(pages.next_items())]
        assert pages.has_next
        found += [each.sandbox_id for each in await value(pages.next_items())]
        assert not pages.has_next
        assert found == expected
    for each in made:
        await value(each.kill())


async def test_a_paused_sandbox_keeps_its_memory_until_it_is_connected_to(own: Any) -> None:
    handle = await value(own.commands.run("read go; echo $go", background=True, stdin=True, timeout=0))
    await value(handle.disconnect())
    assert await value(own.pause()) is True
    assert await value(own.pause()) is False
    assert (await value(own.get_info())).state == SandboxState.PAUSED
    assert await value(own.is_running()) is False
    with pytest.raises(SandboxNotRunningException):
        await value(own.commands.run("true"))
    assert await value(own.get_metrics()) == []

    await value(own.connect())
    await value(own.commands.send_stdin(handle.pid, "still here\n"))
    again = await value(own.commands.connect(handle.pid))
    assert (await value(again.wait())).stdout == "still here\n"


async def test_forks_and_snapshots_have_the_files_of_their_moment(own: Any) -> None:
    kind = type(own)
    await value(own.files.write("/tmp/state", "common"))
    one, two = await value(own.fork(count=2))
    await value(one.files.write("/tmp/state", "changed"))
    assert await value(two.files.read("/tmp/state")) == "common"
    assert await value(own.files.read("/tmp/state")) == "common"

    snapshot = await value(own.create_snapshot(name=f"snap-{kind.__name__.lower()}"))
    await value(own.files.write("/tmp/state", "later"))
    listed = await value(kind.list_snapshots(sandbox_id=own.sandbox_id).next_items())
    assert [each.snapshot_id for each in listed] == [snapshot.snapshot_id]
    third = await value(kind.create(snapshot.snapshot_id, envs={"NEW": "yes"}))
    assert await value(third.files.read("/tmp/state")) == "common"
    assert (await value(third.commands.run("echo $NEW"))).stdout == "yes\n"
    assert await value(kind.delete_snapshot(snapshot.snapshot_id)) is True
    assert await value(kind.delete_snapshot(snapshot.snapshot_id)) is False
    for each in (one, two, third):
        await value(each.kill())


@KINDS
async def test_wrong_requests_have_the_classes_of_the_sdk(kind: Any, server: Any) -> None:
    with pytest.raises(AuthenticationException):
        await value(kind.create(api_key="e2b_wrong"))
    with pytest.raises(SandboxException, match="template 'unknown' not found"):
        await value(kind.create("unknown"))
    with pytest.raises(SandboxException, match="timeout"):
        await value(kind.create(timeout=10_000_000))
    with pytest.raises(SandboxException, match=r"engine \w+: iam"):
        await value(kind.create(iam={"tokens": {"aws": {"audience": "x", "token_type": "JWT-SVID"}}}))
    with pytest.raises(SandboxException, match="egress_proxy"):
        await value(kind.create(network={"egress_proxy": {"address": "127.0.0.1:1080"}}))


async def test_too_many_sandboxes_are_a_rate_limit(server: Any) -> None:
    made = []

    async def make() -> None:
        for _ in range(10):
            made.append(await AsyncSandbox.create(retries=0))

    with pytest.raises(RateLimitException, match="max_sandboxes"):
        await make()
    for each in made:
        await each.kill()


@KINDS
async def test_a_repeated_idempotency_key_makes_one_sandbox(kind: Any, server: Any) -> None:
    key = f"key-{kind.__name__.lower()}"
    one, two = [await value(kind.create(idempotency_key=key)) for _ in range(2)]
    assert one.sandbox_id == two.sandbox_id
    await value(one.kill())


async def test_the_network_of_a_running_sandbox_can_only_be_confirmed(box: Any) -> None:
    await value(box.update_network({"allow_internet_access": False}))
    with pytest.raises(SandboxException, match="denyOut"):
        await value(box.update_network({"deny_out": ["10.0.0.0/8"]}))
