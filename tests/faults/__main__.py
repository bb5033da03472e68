"""`python -m tests.faults`: rounds until the time is over or an invariant is broken; a table of what was done."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from .faults import KINDS
from .harness import JOBS_A_ROUND, Round, RoundResult


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to begin new rounds (300)")
    parser.add_argument("--seed", type=int, help="of the first round; each further one has the next number")
    parser.add_argument("--faults", default=",".join(KINDS), help="which, with commas between them (all)")
    parser.add_argument("--jobs", type=int, default=JOBS_A_ROUND, help=f"in each round ({JOBS_A_ROUND})")
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in options.faults.split(",") if kind]
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"--faults {kind}: not one of {', '.join(KINDS)}")
    logging.basicConfig(level=logging.ERROR)  # that connections break is no news here
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    results: list[RoundResult] = []
    began = time.monotonic()
    while not results or (time.monotonic() - began < options.seconds and not results[-1].failures):
        results.append(asyncio.run(Round(seed + len(results), kinds, options.jobs).run()))
        _progress(results[-1])
    if options.json:
        print(msgspec.json.encode({"rounds": results}).decode())
    else:
        _table(results)
    for failure in results[-1].failures:
        _report(
            f"\n--- {failure.job} ---\n{failure.what}\n{failure.log and 'the log of the server:'}\n{failure.log}"
        )
    if results[-1].failures:
        flags = f"--seconds 0 --seed {results[-1].seed} --faults {options.faults} --jobs {options.jobs}"
        _report(f"a broken invariant; to repeat the round: python -m tests.faults {flags}")
        return 1
    return 0


def _progress(result: RoundResult) -> None:
    faults = " ".join(f"{kind} {count}" for kind, count in sorted(result.faults.items()))
    ending = "BROKEN" if result.failures else "whole"
    _report(
        f"round {result.seed}: {sum(result.jobs.values())} jobs, {result.bytes_checked / 1e6:.1f} MB, "
        f"{result.restarts} restarts; {faults}; {result.refused} refused, {result.slow} slow; "
        f"{result.seconds:.1f} s; server {result.server_rss / 1e6:.0f} MB: {ending}"
    )
    for skipped in result.skipped:
        _report(f"  skipped {skipped}")


def _table(results: Sequence[RoundResult]) -> None:
    jobs: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for result in results:
        jobs.update(result.jobs)
        faults.update(result.faults)
    rows: list[tuple[str, str]] = [
        ("rounds", f"{len(results)} (seeds {results[0].seed} to {results[-1].seed})"),
        ("jobs", str(sum(jobs.values()))),
        *((f"  {kind}", str(count)) for kind, count in sorted(jobs.items())),
        ("bytes checked", f"{sum(result.bytes_checked for result in results):,}"),
        ("told lost while scarce", f"{sum(result.bytes_reported_lost for result in results):,}"),
        ("refused while scarce", str(sum(result.refused for result in results))),
        ("slow jobs, spared", str(sum(result.slow for result in results))),
        ("faults", str(sum(faults.values()))),
        *((f"  {kind}", str(count)) for kind, count in sorted(faults.items())),
        ("server restarts", str(sum(result.restarts for result in results))),
        ("server memory at a round's end", f"{max(result.server_rss for result in results) / 1e6:.0f} MB at most"),
        ("broken invariants", str(sum(len(result.failures) for result in results))),
    ]
    for name, value in rows:
        print(f"{name:<32}{value}")


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
