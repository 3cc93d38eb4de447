"""Prints which lines of an installed vLLM's cache manager the default traffic of `hkv diff` goes through.

Every seed of every feature is performed by the engine `vllm` under coverage. Lines of functions are counted, not those
that run when a module is imported. What is not reached stands in a table by function, with the reason.

Example:
  VLLM/bin/python benchmarks/reached_lines.py --seeds 50 --markdown docs/tables/reached-branches.md
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import pathlib
import sys

import coverage

from hkv.contract import registry
from hkv.errors import HKVError
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import ALL, features_of, record

MODULES = (
    "kv_cache_manager",
    "kv_cache_coordinator",
    "single_type_kv_cache_manager",
    "block_pool",
    "kv_cache_utils",
    "kv_cache_metrics",
)
"""Modules of `vllm.v1.core` of which lines are counted."""

PACKAGE = "vllm.v1.core"
STEPS = 16
FIRST, LAST = "| module |", "## Branches of the reference"
"""Beginning and end of the part of the page that is written."""


ASKED = "a question that changes nothing and that no operation of the log asks: what it tells of is compared"
ASKED_WHOLE = "asked with each state, but not with `allow_none`, of an empty pool, or of cross attention that is cached"
HISPARSE = "HiSparse, whose groups no header describes (docs/oplog.md)"
GUARD = "a check of vLLM's own that callers never fail, or an early return that they avoid"
METRICS = "metrics are off unless asked for, and decide nothing"
PLANNING = "made before there is a manager; compared by the tests of plans"
HASHED = "the seed of hashes is set from outside, so that runs are equal"
ABSTRACT = "overridden by each kind that traffic has"
UNCACHED = "not asked where a group, or everything, is uncached"

REASONS = (
    ("kv_cache_manager:KVCacheBlocks.get_block_ids", ASKED_WHOLE),
    ("kv_cache_manager:KVCacheManager.estimate_cached_tokens", ASKED_WHOLE),
    ("kv_cache_manager:KVCacheBlocks", ASKED),
    ("kv_cache_manager:KVCacheManager.allocate_slots", HISPARSE),
    ("kv_cache_manager:KVCacheManager.get_computed_blocks_for_connector", UNCACHED),
    ("kv_cache_manager:KVCacheManager.take_events", GUARD),
    ("kv_cache_manager:KVCacheManager.reset_prefix_cache", "statistics are off"),
    ("kv_cache_manager:", ASKED),
    ("kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks", GUARD),
    ("kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit", ABSTRACT),
    ("kv_cache_coordinator:KVCacheCoordinatorNoPrefixCache", UNCACHED),
    (
        "kv_cache_coordinator:HybridKVCacheCoordinator.__init__",
        "prefill context parallelism",
    ),
    (
        "kv_cache_coordinator:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
        "groups of equal spec of which a later one serves a draft: met by few seeds",
    ),
    ("kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit", HISPARSE),
    ("kv_cache_coordinator:", GUARD),
    ("single_type_kv_cache_manager:HiSparse", HISPARSE),
    ("single_type_kv_cache_manager:_HiSparse", HISPARSE),
    ("single_type_kv_cache_manager:RSWAManager", "a kind that no header describes (docs/oplog.md)"),
    ("single_type_kv_cache_manager:SinkFullAttentionManager", "vLLM 0.33 cannot build it (docs/oplog.md)"),
    ("single_type_kv_cache_manager:SingleTypeKVCacheManager.find_longest_cache_hit", ABSTRACT),
    ("single_type_kv_cache_manager:SingleTypeKVCacheManager.has_positionally_stable_blocks", ASKED),
    ("single_type_kv_cache_manager:MambaManager.has_positionally_stable_blocks", ASKED),
    (
        "single_type_kv_cache_manager:SlidingWindowManager.reachable_block_mask",
        "no alignment, or a last segment that is none: an offloading connector's arguments",
    ),
    ("single_type_kv_cache_manager:CircularBufferManager.find", UNCACHED),
    ("single_type_kv_cache_manager:CircularBufferManager.get_num_skipped_tokens", ABSTRACT),
    ("single_type_kv_cache_manager:CircularBufferManager", "its blocks are never zeroed"),
    ("single_type_kv_cache_manager:CrossAttentionManager", UNCACHED),
    (
        "single_type_kv_cache_manager:MambaManager.allocate_new_blocks",
        "drafts in mode `none`: headers with such states have no caching, and traffic without it no drafts of states",
    ),
    (
        "single_type_kv_cache_manager:MambaManager.get_num_blocks_to_allocate",
        "drafts in mode `none`: headers with such states have no caching, and traffic without it no drafts of states",
    ),
    (
        "single_type_kv_cache_manager:MambaManager.finalize_partial_tail_offload",
        "mode `none`, which offers no state; or a request that goes on, met by few seeds",
    ),
    ("single_type_kv_cache_manager:", GUARD),
    ("block_pool:BlockPool._notify_reuse", HISPARSE),
    ("block_pool:BlockPool.unpin_blocks", HISPARSE),
    ("block_pool:BlockPool.free_blocks", HISPARSE),
    ("block_pool:BlockPool.reset_prefix_cache", f"{HISPARSE}; {METRICS}"),
    ("block_pool:BlockPool.get_new_blocks", f"{METRICS}; without caching"),
    ("block_pool:BlockPool._maybe_evict_cached_block", METRICS),
    ("block_pool:BlockPool.touch", METRICS),
    ("block_pool:BlockPool.get_usage", ASKED_WHOLE),
    ("block_pool:BlockPool", "events are on in all traffic; and early returns for what traffic never asks"),
    ("block_pool:BlockHashToBlockMap.__len__", ASKED),
    ("block_pool:BlockHashToBlockMap", GUARD),
    ("kv_cache_utils:maybe_convert_block_hash", "keys are compared whole, so that events bring them whole"),
    ("kv_cache_utils:resolve_none_hash_seed", HASHED),
    ("kv_cache_utils:get_none_hash_seed", HASHED),
    ("kv_cache_utils:init_none_hash", HASHED),
    ("kv_cache_utils:KVCacheBlock", ASKED),
    ("kv_cache_utils:FreeKVCacheBlockQueue.append", "blocks are given back many at a time"),
    ("kv_cache_utils:FreeKVCacheBlockQueue.iter_blocks_after", HISPARSE),
    ("kv_cache_utils:FreeKVCacheBlockQueue", GUARD),
    ("kv_cache_utils:_gen_mm_extra_hash_keys", "keys are made from a request's beginning on, or from where they end"),
    ("kv_cache_utils:BlockHashListWithBlockSize", GUARD),
    ("kv_cache_utils:resolve_block_hashes", GUARD),
    ("kv_cache_utils:", PLANNING),
    ("kv_cache_metrics:", METRICS),
)
"""Beginnings of `module:function`, and why what is not reached of them is not; the first that fits counts."""


def functions(source: str) -> dict[int, str]:
    """The function that each line is inside, by its name with those of its classes; the innermost."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{name}.{child.name}".lstrip(".")
                if isinstance(child, ast.FunctionDef):
                    body = range(child.body[0].lineno, (child.end_lineno or 0) + 1)
                    found.update(dict.fromkeys(body, inside))
                visit(child, inside)
            else:
                visit(child, name)

    visit(ast.parse(source), "")
    return found


def reached(seeds: int) -> coverage.Coverage:
    """Coverage of the default traffic on the installed engine."""
    files = [str(importlib.import_module(f"{PACKAGE}.{name}").__file__) for name in MODULES]
    measured = coverage.Coverage(data_file=None, include=files)
    versions, factory = registry.dialect_of(registry.DEFAULT).versions, engine_factory("vllm")
    for feature in features_of(ALL):
        measured.start()
        for seed in range(seeds):
            try:
                record(factory, feature, seed, versions[seed % len(versions)], STEPS)
            except HKVError as error:  # a defect of vLLM's that a configuration names may end its traffic
                print(f"{feature} {seed}: {error}", file=sys.stderr)
        measured.stop()
        print(f"{feature}: {seeds} seeds", file=sys.stderr)
    return measured


def tables(measured: coverage.Coverage) -> tuple[str, list[str]]:
    """The tables, and the functions whose unreached lines have no reason."""
    rows = ["| module | lines of functions | reached | not reached |", "|---|--:|--:|--:|"]
    missed, unexplained = list[str](), list[str]()
    for name in MODULES:
        path = pathlib.Path(str(importlib.import_module(f"{PACKAGE}.{name}").__file__))
        _, statements, _, missing, _ = measured.analysis2(str(path))
        owners = functions(path.read_text())
        lines = [line for line in statements if line in owners]
        left = [line for line in missing if line in owners]
        rows.append(f"| `{name}` | {len(lines)} | {len(lines) - len(left)} | {len(left)} |")
        by_function = collections.Counter(owners[line] for line in left)
        whole = collections.Counter(owners[line] for line in lines)
        for function, count in by_function.items():
            reason = next((said for prefix, said in REASONS if f"{name}:{function}".startswith(prefix)), "")
            some = "all" if count == whole[function] else ", ".join(str(at) for at in left if owners[at] == function)
            missed.append(f"| `{name}:{function}` | {some} | {reason} |")
            unexplained += [] if reason else [f"{name}:{function} {some}"]
    head = ["", "| not reached | lines | reason |", "|---|---|---|"]
    return "\n".join([*rows, *head, *missed]) + "\n", unexplained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="seeds a feature")
    parser.add_argument("--markdown", type=pathlib.Path, help="a page that has such tables")
    arguments = parser.parse_args()
    said, unexplained = tables(reached(arguments.seeds))
    if arguments.markdown is None:
        print(said)
    else:
        head, _, rest = arguments.markdown.read_text().partition(FIRST)
        _, last, rest = rest.partition(LAST)
        arguments.markdown.write_text(f"{head}{said}\n{last}{rest}")
    if unexplained:
        sys.exit("no reason for what is not reached:\n  " + "\n  ".join(unexplained))


if __name__ == "__main__":
    main()
