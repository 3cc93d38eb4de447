"""Lookups over arbitrary cached sets: the engine's iteration against the definition of a hit."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.traffic.hit_comparison import HitCase, causes, draw_case
from reference.hits import hit_alignment
from tests.suites.suite import CaseSuite, case_check


@case_check("hit alignment", "B-I10")
def alignment(case: HitCase) -> Iterator[str]:
    """A hit is aligned as declared, leaves a token to compute, and comes with exactly the columns that it covers."""
    hit, _, rows = case.looked_up()
    if hit % hit_alignment(case.config) or not 0 <= hit < max(1, case.num_tokens):
        yield f"a hit of {hit} of {case.num_tokens} tokens, where hits are {hit_alignment(case.config)} apart"
    for group, found in enumerate(rows):
        cached = case.config.topology.groups[group].spec.prefix_cacheable
        columns = -(-hit // case.config.block_size(group)) if cached else 0
        if found != columns:
            yield f"a hit of {hit} tokens has {found} columns in group {group}, not {columns}"


@case_check("hit soundness", "B-I8", "B-I12")
def soundness(case: HitCase) -> Iterator[str]:
    """Every group can resume at the hit, drafts included, by `spec.readable`; named causes of a longer one aside."""
    if not any(cause.direction == "more" for cause in causes(case.config, case.num_tokens)):
        hit, best = case.by_iteration(), case.by_definition()
        if hit > best:
            yield f"{hit} tokens were found, {best} can be resumed from"


@case_check("hit maximality", "B-I9")
def maximality(case: HitCase) -> Iterator[str]:
    """No longer hit exists, by trying every length; named causes of a shorter one aside."""
    if not any(cause.direction == "less" for cause in causes(case.config, case.num_tokens)):
        hit, best = case.by_iteration(), case.by_definition()
        if hit < best:
            yield f"{hit} tokens were found, {best} can be resumed from"


@case_check("lookup purity", "B-I10")
def purity(case: HitCase) -> Iterator[str]:
    """The same lookup finds the same again, and a request that is one token longer finds no less."""
    if case.looked_up() != case.looked_up():
        yield "two lookups of one cached set differ"


SUITE = CaseSuite(
    "cached-sets",
    "the reference's hit rule over arbitrary cached sets",
    draw_case,
    (alignment, soundness, maximality, purity),
)
