"""Compares HKV's plans with an installed vLLM's: `python benchmarks/compare_planning.py --cases 2000`.

Every case is a random set of layers with random options in one of the six layouts. HKV plans it twice: as the contract
has it, and with vLLM's known planning defects switched on by name. The second must agree with vLLM on every case; the
first must differ only where a defect shows.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import sys

from hkv.errors import HKVError
from hkv.oracle.vllm_planning import InstalledPlanner
from hkv.planning import plan_vllm
from hkv.planning.records import options_record, plan_record, spec_record
from hkv.testing.layer_sets import LayerSet, draw_layer_set

DEFECTS = frozenset(
    {
        "absent-layers-get-tensors",
        "latent-window-promotion",
        "packed-split-loses-layers",
        "stale-page-padding",
        "window-latent-merge",
        "window-sizes-abort-grouping",
    }
)


def ours(case: LayerSet, bugs: frozenset[str]) -> dict:
    try:
        return plan_record(plan_vllm(case.workers, case.memory, dataclasses.replace(case.options, bugs=bugs)))
    except HKVError as error:
        return {"refused": str(error)}


def difference(mine: dict, theirs: dict) -> str | None:
    if "refused" in mine or "refused" in theirs:
        return None if ("refused" in mine) == ("refused" in theirs) else "refused"
    return next((name for name in theirs if mine[name] != theirs[name]), None)


def record(case: LayerSet, theirs: dict) -> dict:
    return {
        "workers": [{name: spec_record(spec) for name, spec in worker.items()} for worker in case.workers],
        "memory": list(case.memory),
        "options": options_record(case.options),
        "vllm": {"refused": True} if "refused" in theirs else theirs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--record", type=pathlib.Path, help="write the cases and vLLM's plans to this file")
    parser.add_argument("--show", type=int, default=3, help="disagreements to print in full")
    arguments = parser.parse_args()
    planner = InstalledPlanner()
    counts: collections.Counter[str] = collections.Counter()
    recorded, shown = [], 0
    for seed in range(arguments.first, arguments.first + arguments.cases):
        case = draw_layer_set(seed)
        theirs = planner.plan(case.workers, case.memory, case.options)
        mine = ours(case, DEFECTS)
        counts["refused" if "refused" in theirs else "planned"] += 1
        counts[case.options.layout or ""] += 1
        counts["without defects equal"] += difference(ours(case, frozenset()), theirs) is None
        if where := difference(mine, theirs):
            counts["DIFFERENT"] += 1
            if shown < arguments.show:
                shown += 1
                print(f"case {seed} differs in {where}\n ours  {mine.get(where)}\n vllm  {theirs.get(where)}", file=sys.stderr)
        recorded.append(record(case, theirs))
    for name, count in sorted(counts.items()):
        print(f"{name:24} {count}")
    if arguments.record:
        text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in recorded)
        arguments.record.write_text(text)
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
