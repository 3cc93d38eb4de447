"""Compares HKV's plans with an installed vLLM's: `python benchmarks/compare_planning.py --cases 2000`.

Every case is a random set of layers with random options in one of the six layouts. HKV plans it twice: as the contract
has it, and with vLLM's known planning defects switched on by name. The second must agree with vLLM on every case; the
first must differ only where a defect shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator

from benchmarks.installed_planning import InstalledPlanner
from hkv.dialects.vllm.planning import plan_vllm
from hkv.dialects.vllm.planning.cache_plan import serve
from hkv.dialects.vllm.planning.plan import options_record, plan_record
from hkv.dialects.vllm.vectors import LayerSet, draw_layer_set
from hkv.errors import HKVError
from hkv.layout.orders import Order
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.spec.written import spec_record

DEFECTS = frozenset(
    {
        "absent-layers-get-tensors",
        "latent-window-promotion",
        "packed-split-loses-layers",
        "scattered-heads-unaligned",
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


def model_cases(folder: pathlib.Path) -> Iterator[tuple[str, LayerSet]]:
    """Every model of a folder in every layout, on one and two GPUs of either kind of parallelism, and promoted."""
    for path in sorted(folder.glob("*.json")):
        for tensor, stages, hybrid in ((1, 1, True), (2, 1, True), (1, 2, True), (1, 1, False)):
            model = read_model(load_config(path), ReadOptions(tensor_parallel=tensor))
            try:
                served = serve(model, 80 << 30, pipeline_parallel=stages, hybrid=hybrid)
            except HKVError:
                served = serve(model, 80 << 30)
            for order in Order:
                options = dataclasses.replace(served.options, layout=order.value, supported_layouts=None, hybrid=hybrid)
                memory = (80 << 30,) * len(served.stages)
                name = f"{path.stem} tp{tensor} pp{stages} {'hybrid' if hybrid else 'promoted'} {order.value}"
                yield name, LayerSet(served.stages, memory, options)


def compare(cases: Iterator[tuple[str, LayerSet]], planner: InstalledPlanner, show: int) -> tuple[Counter, list]:
    counts: Counter[str] = Counter()
    recorded = []
    for name, case in cases:
        theirs = planner.plan(case.workers, case.memory, case.options)
        counts["refused" if "refused" in theirs else "planned"] += 1
        counts[case.options.layout or ""] += 1
        counts["equal without naming defects"] += difference(ours(case, frozenset()), theirs) is None
        mine = ours(case, DEFECTS)
        if where := difference(mine, theirs):
            counts["DIFFERENT"] += 1
            if counts["DIFFERENT"] <= show:
                print(f"{name} differs in {where}", file=sys.stderr)
                print(f" ours  {mine.get(where)}\n vllm  {theirs.get(where)}", file=sys.stderr)
        recorded.append({"name": name, **record(case, theirs)})
    return counts, recorded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--models", type=pathlib.Path, help="plan the config.json files of this folder instead")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--record", type=pathlib.Path, help="write the cases and vLLM's plans to this file")
    parser.add_argument("--show", type=int, default=3, help="disagreements to print in full")
    arguments = parser.parse_args()
    planner = InstalledPlanner()
    seeds = range(arguments.first, arguments.first + arguments.cases)
    cases: Iterator[tuple[str, LayerSet]] = ((f"case {seed}", draw_layer_set(seed)) for seed in seeds)
    if arguments.models:
        cases = model_cases(arguments.models)
    counts, recorded = compare(cases, planner, arguments.show)
    for name, count in sorted(counts.items()):
        print(f"{name:30} {count}")
    if arguments.record:
        text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in recorded)
        arguments.record.write_text(text)
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
