"""How the server sets up its own process."""

from __future__ import annotations

import subprocess
import sys

#: Prints the most cyclic objects that exist while 300,000 are made. They are old when they end, like ended jobs.
WAITING = """
import collections, gc
from holdfast.server.app import tune_collector
waiting = most = 0
RETAINED = 20_000
class Ended:
    def __init__(self):
        global waiting, most
        self.self = self
        waiting += 1
        most = max(most, waiting)
    def __del__(self):
        global waiting
        waiting -= 1
tune_collector()
gc.collect()
retained = collections.deque(maxlen=RETAINED)
for _ in range(300_000):
    retained.append(Ended())
print(most)
"""


def test_ended_objects_in_cycles_do_not_wait_long_for_the_collector() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80_000, "with the setting of Python: 113,000"
