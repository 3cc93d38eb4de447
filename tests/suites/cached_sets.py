"""Lookups over arbitrary cached sets: the engine's iteration against the definition of a hit."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.traffic.hit_comparison import HitCase, causes, draw_case
from reference.dialects.vllm.coordinator import Coordinator, longest_hit
from reference.dialects.vllm.dialect import VLLM
from reference.dialects.vllm.hits import Found
from reference.dialects.vllm.request import Request
from reference.hits import hit_alignment
from tests.suites.suite import CaseSuite, case_check


def lookup(case: HitCase) -> Found:
    """Hit that the reference finds."""
    cache = Coordinator(case.config, VLLM.kind)
    cache.pool.records = False
    for block, (group, end) in enumerate(sorted(case.entries), start=1):
        cache.pool.insert((group, end), block, end)
    size = case.config.hash_block_size
    keys = list(range(size, case.keyed + 1, size))
    return longest_hit(cache, Request("request", case.num_tokens, case.num_tokens, [*keys]))


@case_check("hit alignment", "B-I10")
def alignment(case: HitCase) -> Iterator[str]:
    """A hit is aligned as declared, leaves a token to compute, and comes with exactly the columns that it covers."""
    found = lookup(case)
    if found.hit % hit_alignment(case.config) or not 0 <= found.hit < max(1, case.num_tokens):
        yield f"a hit of {found.hit} of {case.num_tokens} tokens, where hits are {hit_alignment(case.config)} apart"
    for group, row in enumerate(found.blocks):
        cached = case.config.topology.groups[group].spec.prefix_cacheable
        columns = -(-found.hit // case.config.block_size(group)) if cached else 0
        if len(row) != columns:
            yield f"a hit of {found.hit} tokens has {len(row)} columns in group {group}, not {columns}"


@case_check("hit soundness", "B-I8", "B-I12")
def soundness(case: HitCase) -> Iterator[str]:
    """Every group can resume at the hit, drafts included, by `spec.readable`; named causes of a longer one aside."""
    if not any(cause.direction == "more" for cause in causes(case.config, case.num_tokens)):
        hit, best = lookup(case).hit, case.by_definition()
        if hit > best:
            yield f"{hit} tokens were found, {best} can be resumed from"


@case_check("hit maximality", "B-I9")
def maximality(case: HitCase) -> Iterator[str]:
    """No longer hit exists, by trying every length; named causes of a shorter one aside."""
    if not any(cause.direction == "less" for cause in causes(case.config, case.num_tokens)):
        hit, best = lookup(case).hit, case.by_definition()
        if hit < best:
            yield f"{hit} tokens were found, {best} can be resumed from"


@case_check("lookup purity", "B-I10")
def purity(case: HitCase) -> Iterator[str]:
    """The same lookup finds the same again, and a request that is one token longer finds no less."""
    if lookup(case) != lookup(case):
        yield "two lookups of one cached set differ"


SUITE = CaseSuite(
    "cached-sets",
    "the reference's hit rule over arbitrary cached sets",
    draw_case,
    (alignment, soundness, maximality, purity),
)
