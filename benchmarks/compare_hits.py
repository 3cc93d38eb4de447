"""Cases, and their causes, in which vLLM 0.33's iteration finds another hit than the definition, for `docs/hits.md`.

python benchmarks/compare_hits.py                 # smallest examples, random cached sets, random traffic
python benchmarks/compare_hits.py --vllm          # and the same cached sets looked up by an installed vLLM
python benchmarks/compare_hits.py --logs 0 --json F   # as JSON; a part of 0 cases or logs is left out
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hkv.cli.output_option import json_option, write_json
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.dialects.vllm.traffic.hit_comparison import (
    Cause,
    HitCase,
    causes,
    draw_case,
    has_entry,
    make_config,
    small_cases,
)
from hkv.dialects.vllm.traffic.live import drive
from hkv.spec import Mamba, SlidingWindow
from reference.hits import longest_hit_by_definition

OUT = Console()
LOOKUP_BUGS = frozenset({"finder-index-error", "window-one-never-hits"})
"""Defects of vLLM 0.33 that a lookup can meet; the reference shows them only when asked."""


@click.command()
@click.option("--cases", default=100_000, show_default=True, help="Random cached sets.")
@click.option("--logs", default=2_000, show_default=True, help="Random traffic logs.")
@click.option("--seed", default=0, show_default=True, help="First seed; each case and log has its own.")
@click.option("--vllm", is_flag=True, help="Look the cached sets up in an installed vLLM too.")
@json_option
def main(cases: int, logs: int, seed: int, vllm: bool, json_path: str | None) -> None:
    """Compares the iteration with the definition."""
    OUT.quiet = json_path == "-"
    result: dict[str, Any] = show_smallest(vllm)
    if cases:
        result["random"] = show_random(cases, seed)
    if logs:
        result["traffic"] = show_traffic(logs, seed)
    if cases and vllm:
        result["vllm"] = show_vllm(cases, seed)
    write_json(json_path, result)


def show_smallest(vllm: bool) -> dict[str, Any]:
    """Every cache of one or two groups with blocks of 1 or 2 tokens and requests of up to 3: first example by cause."""
    sizes = [(1, tokens) for tokens in range(1, 6)] + [(2, tokens) for tokens in range(1, 4)]
    first: dict[Cause, HitCase] = {}
    count = differ = 0
    for found in progress(itertools.chain.from_iterable(small_cases(*size) for size in sizes), "small caches"):
        count += 1
        if found.by_iteration() != found.by_definition():
            differ += 1
            named = explained(found)
            if len(named) == 1:
                first.setdefault(next(iter(named)), found)
    windows = [SlidingWindow(block_size=1, window=2), Mamba(block_size=1)]
    by_hand = HitCase(make_config(windows, [0, 1]), 4, frozenset({(0, 1), (0, 3), (0, 4), (1, 1)}))
    rows = [example(cause.name, first[cause], vllm) for cause in Cause]
    rows.append(example(f"{Cause.DROP_NOT_REPEATED.name}, by hand", by_hand, vllm))
    table = Table("cause", "smallest example", "iteration", "definition", *(["vLLM"] if vllm else []))
    for row in rows:
        table.add_row(*map(str, row.values()))
    OUT.print(table)
    OUT.print(f"{count:,} small caches, {differ:,} differ, each for a named cause")
    return {"small": {"caches": count, "differ": differ}, "examples": rows}


def example(cause: str, found: HitCase, vllm: bool) -> dict[str, Any]:
    """One row: a case, and what each side finds."""
    row = {
        "cause": cause,
        "example": str(found),
        "iteration": found.by_iteration(),
        "definition": found.by_definition(),
    }
    if not vllm:
        return row
    try:
        return {**row, "vllm": by_vllm(found)}
    except Exception as error:
        return {**row, "vllm": type(error).__name__}


def show_random(cases: int, seed: int) -> dict[str, Any]:
    """Random cached sets: 1 to 5 groups, unequal blocks, EAGLE subsets, 1 to 4 ranks."""
    counts: collections.Counter[str] = collections.Counter()
    lost: collections.Counter[str] = collections.Counter()
    for number in progress(range(seed, seed + cases), "random sets"):
        found = draw_case(RandomChoices(number))
        iteration, definition = found.by_iteration(), found.by_definition()
        counts["no cause applies"] += not causes(found.config, found.num_tokens)
        if iteration != definition:
            counts["less" if iteration < definition else "more"] += 1
            named = explained(found)
            lost[" + ".join(sorted(cause.name for cause in named))] += 1
    return show_counts(f"{cases:,} random cached sets", counts, lost, cases)


def show_traffic(logs: int, seed: int) -> dict[str, Any]:
    """Lookups of random traffic, where the cache holds what requests left behind."""
    counts: collections.Counter[str] = collections.Counter()
    lost: collections.Counter[str] = collections.Counter()
    for number in progress(range(seed, seed + logs), "traffic logs"):
        choices = RandomChoices(number)
        header = draw_header(choices, FEATURES[number % len(FEATURES)], version=2)
        if header.bugs:
            header.bugs = []
        engine = PlainEngine(header)

        def perform(operation: oplog.Operation, engine: PlainEngine = engine) -> Any:
            answer = apply(engine, operation)
            if isinstance(operation, oplog.LookupOp) and isinstance(answer, oplog.Hit):
                note(engine, operation.id, answer.hit, counts, lost)
            return answer

        drive(header, choices, perform, steps=12)
    return show_counts(f"{counts['lookups']:,} lookups of {logs:,} traffic logs", counts, lost, counts["lookups"])


def note(engine: PlainEngine, id: str, hit: int, counts: collections.Counter, lost: collections.Counter) -> None:
    """Counts one lookup."""
    config, num_tokens = engine.config, engine.record(id).tokens
    best = longest_hit_by_definition(config, has_entry(engine, id), num_tokens)
    counts["lookups"] += 1
    counts["hits"] += hit > 0
    if hit != best:
        counts["less" if hit < best else "more"] += 1
        direction = "less" if hit < best else "more"
        named = [cause.name for cause in causes(config, num_tokens) if cause.direction == direction]
        assert named, (config, id, hit, best)
        lost[" + ".join(sorted(named))] += 1


def explained(found: HitCase) -> frozenset[Cause]:
    """The causes that can make this difference; there must be one."""
    direction = "less" if found.by_iteration() < found.by_definition() else "more"
    named = frozenset(cause for cause in causes(found.config, found.num_tokens) if cause.direction == direction)
    assert named, str(found)
    return named


def show_counts(title: str, counts: collections.Counter, lost: collections.Counter, total: int) -> dict[str, Any]:
    """Prints counts and shares, and returns the counts."""
    table = Table("", "count", "share", title=title, title_justify="left")
    for name in sorted(set(counts) - {"lookups"}):
        table.add_row(name, f"{counts[name]:,}", f"{counts[name] / total:.3%}")
    for name, count in lost.most_common():
        table.add_row(f"  {name}", f"{count:,}", f"{count / total:.3%}")
    OUT.print(table)
    return {"total": total, "counts": dict(counts), "causes": dict(lost)}


def progress(cases: Iterable[Any], what: str) -> Iterable[Any]:
    """The cases; a bar on a terminal."""
    return track(cases, what, console=Console(stderr=True), disable=not sys.stderr.isatty())


def show_vllm(cases: int, seed: int) -> dict[str, Any]:
    """The same cached sets in an installed vLLM's own coordinator."""
    counts: collections.Counter[str] = collections.Counter()
    for number in progress(range(seed, seed + cases), "installed vLLM"):
        found = draw_case(RandomChoices(number))
        found = dataclasses.replace(found, config=dataclasses.replace(found.config, bugs=LOOKUP_BUGS))
        ours, theirs = outcome(found.by_iteration), outcome(lambda found=found: by_vllm(found))
        counts["same"] += ours == theirs
        if ours != theirs:
            OUT.print(f"{found}: vLLM {theirs}, iteration {ours}")
    return show_counts(f"{cases:,} cached sets, iteration against installed vLLM", counts, collections.Counter(), cases)


def outcome(lookup: Any) -> int | str:
    """Result of a lookup, or "fails"."""
    try:
        return lookup()
    except Exception:
        return "fails"


def by_vllm(found: HitCase) -> int:
    """The hit that vLLM's coordinator finds, in tokens."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id  # pyright: ignore[reportMissingImports]

    from hkv.dialects.vllm.engines import vllm_objects

    manager = vllm_objects.manager(found.config)
    pool = manager.block_pool
    for block, (group, end) in enumerate(sorted(found.entries), start=1):
        key: Any = make_block_hash_with_group_id(end.to_bytes(32, "big"), group)  # type: ignore[arg-type]
        pool._insert_block_hash(key, pool.blocks[block], end)
    size = found.config.hash_block_size
    keys = [end.to_bytes(32, "big") for end in range(size, found.keyed + 1, size)]
    return manager.coordinator.find_longest_cache_hit(keys, found.num_tokens - 1)[1]


if __name__ == "__main__":
    main()
