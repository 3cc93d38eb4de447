r"""Records the logs in tests/data from an installed engine, choosing seeds that together reach most of reference/.

For every feature and seed it records a short log, runs the reference on it under coverage, and then takes, greedily,
the log that reaches the most branches not yet reached, per byte; a feature that has too few is filled up by the rules
that its logs exercise. Versions 1 and 2, where a dialect has both, alternate by seed.

Examples (in the environments that .ci/peers makes for vLLM and SGLang):
  python benchmarks/record_test_logs.py --seeds 60 --folder tests/data/oplogs
  python benchmarks/record_test_logs.py --dialect sglang-0.5.23 --engine sglang --per-feature 4 \
    --folder tests/data/sglang
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile

import coverage

from hkv.contract import registry
from hkv.contract.log import Log
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.record import Only, record

ROOT = pathlib.Path(__file__).resolve().parent.parent

Arc = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recorded log: its bytes, the branches of the reference it reaches, the rules it exercises."""

    name: str
    feature: str
    data: bytes
    reached: frozenset[object]
    rules: frozenset[object]


def reached_by(log: Log) -> frozenset[Arc]:
    """The branches of reference/ that checking a log takes, as (file, from line, to line)."""
    measured = coverage.Coverage(branch=True, data_file=None, include=[str(ROOT / "reference" / "*")])
    measured.start()
    try:
        difference = check_log(log, engine_factory("numpy"))
    finally:
        measured.stop()
    if difference is not None:
        raise SystemExit(difference.describe())
    data = measured.get_data()
    files = data.measured_files()
    return frozenset((file, start, end) for file in files for start, end in data.arcs(file) or ())


def candidates(name: str, engine: str, seeds: int, steps: int) -> list[Candidate]:
    made = []
    dialect = registry.dialect_of(name)
    versions = [version for version in dialect.versions if version <= 2]
    with tempfile.TemporaryDirectory() as folder:
        for feature in dialect.short_features(name):
            for seed in range(seeds):
                version, only = versions[seed % len(versions)], Only(dialect=name)
                recording = record(engine_factory(engine), feature, seed, version, steps, only)
                path = pathlib.Path(folder, "log.jsonl")
                write_log(path, recording.header, recording.operations, recording.answers)
                log = read_log(path)
                rules = frozenset(dialect.exercised(log))
                made.append(Candidate(f"{feature}-{seed}.jsonl", feature, path.read_bytes(), reached_by(log), rules))
            print(feature, file=sys.stderr)
    return made


def choose(made: list[Candidate], per_feature: int) -> list[Candidate]:
    chosen: list[Candidate] = []
    reached: set[object] = set()
    while left := [c for c in made if c not in chosen and c.reached - reached]:
        best = max(left, key=lambda c: len(c.reached - reached) / len(c.data))
        chosen.append(best)
        reached |= best.reached
    for feature in sorted({c.feature for c in made}):
        have = [c for c in chosen if c.feature == feature]
        while len(have) < per_feature:
            rules = {rule for c in have for rule in c.rules}
            left = [c for c in made if c.feature == feature and c not in have]
            best = max(left, key=lambda c: (len(c.rules - rules) + 1) * len(c.rules) / len(c.data))
            have.append(best)
            chosen.append(best)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialect", default=registry.DEFAULT)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--per-feature", type=int, default=12)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "tests" / "data" / "oplogs")
    arguments = parser.parse_args()
    chosen = choose(
        candidates(arguments.dialect, arguments.engine, arguments.seeds, arguments.steps), arguments.per_feature
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for old in arguments.folder.glob("*.jsonl"):
        old.unlink()
    for candidate in chosen:
        (arguments.folder / candidate.name).write_bytes(candidate.data)
    print(f"{len(chosen)} logs, {sum(len(c.data) for c in chosen):,} bytes in {arguments.folder}")


if __name__ == "__main__":
    main()
