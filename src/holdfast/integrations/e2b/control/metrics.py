"""Resource use of a sandbox at the moment of a request: processes by `usage`, the disk by `df`.

CPU use is the mean since the previous request, or since the first process. Touches the sandbox.
"""

from __future__ import annotations

import time
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.integrations.e2b.control.records import machine_cpus, machine_memory, moment
from holdfast.integrations.e2b.open_sandbox import OpenSandbox

#: Sandboxes whose last sample is kept for the next difference.
_MAX_SAMPLES: Final = 1_000
_DF_SECONDS: Final = 5.0


class Metrics:
    """Samples of sandboxes, each with a difference to the one before."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    async def sample(self, opened: OpenSandbox) -> dict[str, Any]:
        processes = await opened.box.processes()
        running = [process.id for process in processes if process.info.running]
        usage = await opened.box.usage(running) if running else None
        usages = usage.usages if usage is not None else ()
        cpu = sum(each.cpu_seconds for each in usages)
        now = time.time()
        before, spent = self._last.pop(opened.ref.id, (opened.ref.created_at, 0.0))
        while len(self._last) >= _MAX_SAMPLES:
            self._last.pop(next(iter(self._last)))
        self._last[opened.ref.id] = now, cpu
        template = opened.ref.record.template
        used, total = await self._disk(opened)
        return {
            "timestamp": moment(now),
            "timestampUnix": int(now),
            "cpuCount": max(1, round(template.cpus or machine_cpus())),
            # A process that ended takes its time with it.
            "cpuUsedPct": round(max(0.0, 100 * (cpu - spent) / max(now - before, 0.001)), 2),
            "memUsed": sum(each.memory_bytes for each in usages),
            "memTotal": template.memory or machine_memory(),
            "memCache": 0,
            "diskUsed": used,
            "diskTotal": template.disk or total,
        }

    async def _disk(self, opened: OpenSandbox) -> tuple[int, int]:
        try:
            done = await opened.box.exec(["df", "-kP", "/"], timeout=_DF_SECONDS)
            fields = done.stdout.splitlines()[-1].split()
            return int(fields[2]) * 1024, int(fields[1]) * 1024
        except (HoldfastError, IndexError, ValueError):
            # An image without `df`.
            return 0, 0
