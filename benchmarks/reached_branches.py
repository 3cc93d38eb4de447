"""Prints which branches of the reference random traffic reaches, in how many seeds, and which never.

Each seed of each feature is performed by the NumPy engine under coverage. With `--keep`, the configurations of the
seeds that together reach all branches, and all pairs of rules that one operation exercises, the rare ones first, are
written where the feature `steered` of the traffic finds them.

Example:
  python benchmarks/reached_branches.py --seeds 50 --markdown docs/tables/reached-branches.md
  python benchmarks/reached_branches.py --seeds 250 --keep 50
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Hashable
from typing import Any

import coverage

from hkv.contract import registry
from hkv.contract.traffic import STEERED, KeptTraffic, RandomChoices
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.traffic import headers
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import ALL, choose, draw, features_of
from reference.language import recording

ROOT = pathlib.Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "reference" / "dialects" / "vllm"
DIALECT = registry.dialect_of("vllm-0.33")
STEPS = 16
REFUSALS = ("raise OperationError", "raise ConfigError", "raise UnsupportedConfigError", "raise EngineFailure")
"""Lines that legal traffic never reaches."""

Branch = tuple[str, int, int]
"""File, line, and the line that follows; that of a return is below zero."""

Drawn = tuple[str, int]
"""Feature and seed."""


@dataclasses.dataclass(frozen=True)
class Reached:
    """Arcs of the reference that a seed went through, and the sets of rules that operations of it exercised."""

    kept: KeptTraffic
    arcs: frozenset[Branch]
    rules: frozenset[frozenset[str]]


def run(feature: str, seed: int, every: coverage.CoverageData) -> Reached:
    """Performs the traffic of a seed under coverage, which is added to `every`."""
    version = DIALECT.versions[seed % len(DIALECT.versions)]
    header, choices = draw(feature, seed, version)
    if feature != STEERED:
        choices = RandomChoices(seed)  # as the configuration will be gone through if it is kept
    engine, text = engine_factory("numpy")(header), PlainEngine(header)
    rules: set[frozenset[str]] = set()
    measured = coverage.Coverage(branch=True, data_file=None, include=[str(REFERENCE / "*")])

    def perform(operation: Any) -> Any:
        answer = DIALECT.perform(engine, operation)
        exercised = set[str]()
        with recording(exercised.add):
            DIALECT.perform(text, operation)
        rules.add(frozenset(exercised))
        return answer

    measured.start()
    try:
        DIALECT.drive(header, choices, perform, STEPS)
    finally:
        measured.stop()
    data = measured.get_data()
    every.update(data)
    arcs = {
        (str(pathlib.Path(file).relative_to(REFERENCE)), start, end)
        for file in data.measured_files()
        for start, end in data.arcs(file) or ()
    }
    return Reached(KeptTraffic(header, seed), frozenset(arcs), frozenset(rules))


def branches(every: coverage.CoverageData) -> list[Branch]:
    """All branches of the reference's files, reached or not, as coverage finds them in the source."""
    measured = coverage.Coverage(branch=True, data_file=None, include=[str(REFERENCE / "*")])
    for refusal in REFUSALS:
        measured.exclude(refusal)
    measured.get_data().update(every)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "report.json")
        measured.json_report([str(file) for file in sorted(REFERENCE.rglob("*.py"))], outfile=str(path))
        files = json.loads(path.read_text())["files"]
    found: list[Branch] = []
    for name, file in files.items():
        short = str(pathlib.Path(ROOT, name).relative_to(REFERENCE))
        found += [(short, start, end) for start, end in file["executed_branches"] + file["missing_branches"]]
    return sorted(found)


def table(found: dict[Drawn, Reached], every: list[Branch]) -> str:
    """Table in Markdown: by file, how many branches there are; then those that few seeds reach or none."""
    features = list(dict.fromkeys(feature for feature, _ in found))
    times = collections.Counter(arc for reached in found.values() for arc in reached.arcs)
    by_feature = collections.Counter((feature, arc) for (feature, _), reached in found.items() for arc in reached.arcs)
    few = len(found) // 100
    lines = ["| file | branches | reached | by under 1 % of the seeds | never |", "|---|--:|--:|--:|--:|"]
    for file in dict.fromkeys(branch[0] for branch in every):
        mine = [times[branch] for branch in every if branch[0] == file]
        rare = sum(0 < count < few for count in mine)
        lines.append(f"| `{file}` | {len(mine)} | {sum(map(bool, mine))} | {rare} | {mine.count(0)} |")
    lines += ["", f"| branch | seeds of {len(found):,} | by feature |", "|---|--:|---|"]
    for branch in sorted((each for each in every if times[each] < few), key=lambda each: times[each]):
        of = [f"{feature} {by_feature[feature, branch]}" for feature in features if by_feature[feature, branch]]
        lines.append(f"| {_said(branch)} | {times[branch]} | {', '.join(of) or '**never**'} |")
    return "\n".join(lines) + "\n"


def _said(branch: Branch) -> str:
    file, start, end = branch
    text = (REFERENCE / file).read_text().splitlines()[start - 1].strip().replace("|", "\\|")
    return f"`{file}:{start}` `{text}` to {'the end' if end < 0 else f'line {end}'}"


def signals(reached: Reached, every: frozenset[Branch]) -> frozenset[Hashable]:
    """Elements that a seed reached: branches; rules, each pair of them that one operation exercised, and each rule
    under each property of the configuration."""
    header = reached.kept.header
    specs = f"{min(3, len(set(DIALECT.topology(header).specs)))} specs"
    properties = {
        "drafts": header.eagle,
        "keys look ahead": header.hash_lookahead > 0,
        "ranks": header.context_parallel > 1,
        "sparse": header.retention_interval is not None,
        "hits inside blocks": header.partial_hits,
        "no caching": not header.caching,
        specs: True,
    }
    said: set[Hashable] = set(reached.arcs & every)
    for rules in reached.rules:
        said |= {frozenset(pair) for pair in itertools.combinations(sorted(rules), 2)} | rules
        said |= {(rule, name) for rule in rules for name, so in properties.items() if so}
    return frozenset(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="seeds a feature")
    parser.add_argument("--feature", action="append", help="only this one; repeatable")
    parser.add_argument("--markdown", type=pathlib.Path, help="a page whose last part is to be this table")
    parser.add_argument("--keep", type=int, help="keep so many configurations")
    arguments = parser.parse_args()
    features = [each for each in features_of(ALL) if arguments.keep is None or each != STEERED]
    every = coverage.CoverageData(no_disk=True)
    found: dict[Drawn, Reached] = {}
    for feature in arguments.feature or features:
        found |= {(feature, seed): run(feature, seed, every) for seed in range(arguments.seeds)}
        print(f"{feature}: {arguments.seeds} seeds", file=sys.stderr)
    all_branches = branches(every)
    if arguments.keep is not None:
        reached = {name: signals(each, frozenset(all_branches)) for name, each in found.items()}
        chosen = choose(reached, arguments.keep, lambda name: name[0])
        headers.KEPT.write_bytes(headers.written([found[name].kept for name in chosen]))
        print(f"{len(chosen)} configurations in {headers.KEPT}")
    said = table(found, all_branches)
    if arguments.markdown is None:
        print(said)
    else:
        head, _, _ = arguments.markdown.read_text().partition("| file |")
        arguments.markdown.write_text(head + said)


if __name__ == "__main__":
    main()
