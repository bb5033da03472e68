"""Rollouts for reinforcement learning on a Ray cluster, each in its own fork of a prepared sandbox.

    python examples/integrations/rollouts.py 1000
    python examples/integrations/rollouts.py 1000 docker debian:12

The environment is a number that a program in the sandbox keeps secret; an action is a guess, and the reward is
higher for fewer guesses. Setup runs once on each node. A rollout whose node is lost runs again, in another fork.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import ray

from holdfast.ray import SandboxPool

#: The environment of an episode: replies to a guess in $1, and counts the guesses in a file of the sandbox.
STEP = """
echo x >>/root/guesses
if [ "$1" -lt "$(cat /root/secret)" ]; then echo higher
elif [ "$1" -gt "$(cat /root/secret)" ]; then echo lower
else wc -l </root/guesses; fi
"""


@ray.remote
def rollout(pool: SandboxPool, seed: int) -> int:
    """Play one episode; returns the number of guesses that the environment counted."""
    chance = random.Random(seed)
    with pool.take() as box:
        box.write_file("/root/secret", f"{chance.randint(1, 64)}\n")
        low, high = 1, 64
        while True:
            guess = chance.randint(low, high)
            reply = box.exec(["sh", "/root/step", str(guess)], check=True).stdout.strip()
            if reply == "higher":
                low = guess + 1
            elif reply == "lower":
                high = guess - 1
            else:
                return int(reply)


def main(episodes: int = 1000, engine: str = "bwrap", image: str | None = None) -> None:
    fields: dict[str, Any] = {} if image is None else {"image": image}
    ray.init(include_dashboard=False, log_to_driver=False)
    with SandboxPool(engine, fork=True, max=8, files={"/root/step": STEP}, **fields) as pool:
        task = rollout.options(**pool.options(retries=3))
        guesses = ray.get([task.remote(pool, seed) for seed in range(episodes)])
    print(f"{len(guesses)} episodes, {sum(guesses) / len(guesses):.1f} guesses on average, {max(guesses)} at most")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, *sys.argv[2:])
