"""`python -m tests.suites`: many examples of every suite on the code as it is, where each must pass."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.suites import SUITES
from tests.suites.suite import Suite


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs examples and prints a line for each that fails and one for each suite; 1 if any fails."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"SUITE is {unknown[0]!r}, expected one of {', '.join(SUITES)}")
    if options.examples < 1 or options.first_seed < 0:
        parser.error(f"--examples is {options.examples}, expected 1 or more; --first-seed 0 or more")
    failed = 0
    for name in options.suites or SUITES:
        suite, start = SUITES[name], time.perf_counter()
        count = options.examples * suite.pace
        found = sum(_fails(suite, seed) for seed in range(options.first_seed, options.first_seed + count))
        print(f"{name}: {count} examples, {found} failed, {time.perf_counter() - start:.0f} s", flush=True)
        failed += found
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=main.__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="all if none is named")
    parser.add_argument("--examples", type=int, default=1000, help="of traffic; of faster suites more")
    parser.add_argument("--first-seed", type=int, default=0)
    return parser


def _fails(suite: Suite, seed: int) -> bool:
    try:
        failure = suite.run(seed)
    except Exception as error:
        print(f"{suite.name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
        return True
    if failure is not None:
        print(f"{suite.name}, seed {seed}: {failure.invariant}: {failure.problem}", flush=True)
    return failure is not None


if __name__ == "__main__":
    sys.exit(main())
