"""`process/usage` over every way to a sandbox: the same ids, the same answer."""

from __future__ import annotations

import re

from holdfast import Sandbox


async def test_a_process_and_a_shell_are_told_in_one_look(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "sleep 1000 & echo $!; wait"], id="usage-p")
    found = await process.wait_for_output(re.compile(rb"(\d+)\n"), timeout=60)
    async with await box.shell(id="usage-s"):
        sample = await box.usage(["usage-p", "usage-s", "nobody"])
    assert [usage.process_id for usage in sample.usages] == ["usage-p", "usage-s"]
    of_process, of_shell = sample.usages
    assert of_process.pids == tuple(sorted((process.pid, int(found.text))))
    assert (of_shell.process_count, of_shell.foreground, of_shell.running) == (1, None, True)
    assert of_process.printed_bytes == len(found.data)
    await process.terminate(force=True)
    (after,) = (await box.usage(["usage-p"])).usages
    assert (after.running, after.process_count, after.pids) == (False, 0, ())
