"""Causes for which vLLM 0.33's fixed-point iteration may find another hit than the definition, by name.

`docs/hits.md` explains each with its smallest example. Where none applies, the two are equal; tests hold that.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec import LayerSpec


class Cause(enum.Enum):
    """A reason for a difference; the value says which way it goes and what is needed for it."""

    SHARED_DROP = "less: an EAGLE group has a twin of equal spec that is none, and the twin must drop too"
    LONE_DROP = "less: the only group is an EAGLE group, and the block that it drops would end at the request's end"
    SHORT_PREFIX_DROP = "less: an EAGLE window with blocks smaller than the alignment is rounded down before it drops"
    LONGER_ENTRY = (
        "less: an entry that ends beyond the lengths being tried is not looked at, though it holds one of them"
    )
    UNREAD_WINDOW = (
        "less: a window of one token reads no entry, and yet a key is asked for (or, as a known defect, an entry)"
    )
    DROP_NOT_REPEATED = "more: an EAGLE window has dropped, another EAGLE group shortens the hit, and it need not anew"
    CHUNK_OFF_GRID = "more: chunks do not start at blocks, and the block in which one starts is not looked at"

    @property
    def direction(self) -> str:
        """`less` or `more`: what the iteration finds, compared with the definition."""
        return self.value.partition(":")[0]


class _SpecGroup(NamedTuple):
    """Groups of equal spec: how many, their block in tokens, whether all drop, and some only because a twin does."""

    spec: LayerSpec
    members: int
    block_size: int
    eagle: bool
    shared: bool


def causes(config: VllmConfig, num_tokens: int) -> frozenset[Cause]:
    """The causes that can make a difference for a request of `num_tokens` tokens under this configuration."""
    if not config.caching:
        return frozenset()
    joined = _spec_groups(config)
    windows = [group for group in joined if group.spec.seeks_run]
    alone = len(config.topology.groups) == 1
    dropping = any(group.eagle and not group.spec.snapshot for group in joined)
    found: set[Cause] = set()
    if any(group.shared and not group.spec.snapshot for group in joined):
        found.add(Cause.SHARED_DROP)
    if alone and dropping and config.hash_lookahead == 0 and num_tokens % config.hash_block_size == 0:
        found.add(Cause.LONE_DROP)
    if not alone and any(group.eagle and group.block_size < _alignment(config) for group in windows):
        found.add(Cause.SHORT_PREFIX_DROP)
    if config.partial_hits and _may_miss_a_longer_entry(config, joined, num_tokens):
        found.add(Cause.LONGER_ENTRY)
    asks = config.hash_lookahead or "window-one-never-hits" in config.bugs
    if asks and any(group.spec.resumes_anywhere for group in windows):
        found.add(Cause.UNREAD_WINDOW)
    if _may_outrun_a_window(joined):
        found.add(Cause.DROP_NOT_REPEATED)
    if any(spec.off_grid for spec in config.topology.specs):
        found.add(Cause.CHUNK_OFF_GRID)
    return frozenset(found)


def _alignment(config: VllmConfig) -> int:
    return config.hash_block_size if config.partial_hits else config.scheduler_block_size


def _spec_groups(config: VllmConfig) -> list[_SpecGroup]:
    """Groups that are looked up together, in the order of lookup: groups of equal spec, full attention first."""
    members: dict[LayerSpec, list[int]] = {}
    for index, group in enumerate(config.topology.groups):
        if group.spec.prefix_cacheable:
            members.setdefault(group.spec, []).append(index)
    found = []
    for spec in sorted(members, key=lambda spec: not spec.reads_all):
        indices = members[spec]
        drops = [index in config.eagle_group_ids for index in indices]
        shared = any(drops) and not all(drops)
        found.append(_SpecGroup(spec, len(indices), config.block_size(indices[0]), any(drops), shared))
    return found


def _may_miss_a_longer_entry(config: VllmConfig, joined: list[_SpecGroup], num_tokens: int) -> bool:
    """True if some full attention may be asked for a length inside a block whose end has a key, but is not tried.

    The first spec is asked up to the last token but one, so that only an entry at the request's end is beyond; another
    up to what the first one found. Of twins, one may have the longer entry and the other the shorter.
    """
    full = [group for group in joined if group.spec.reads_all]
    inside = [group.block_size > config.hash_block_size for group in full]
    paired = [group.members > 1 for group in full]
    at_the_end = config.hash_lookahead == 0 and num_tokens % config.hash_block_size == 0
    beyond = any(inside[1:]) or any(fine and twins for fine, twins in zip(inside, paired, strict=True))
    return beyond or (at_the_end and any(inside))


def _may_outrun_a_window(joined: list[_SpecGroup]) -> bool:
    dropping = [group.spec for group in joined if group.eagle and not group.spec.reads_all]
    return len(dropping) > 1 and any(spec.seeks_run for spec in dropping)
