"""Cached sets, drawn and enumerated, on which the engine's iteration is compared with the definition of a hit."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from hkv.contract.traffic import Choices
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig, manager_block
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.plain import empty, groups_of
from hkv.dialects.vllm.traffic.headers import derive_partial_hits
from hkv.errors import HKVError
from hkv.model.topology import Topology
from hkv.spec import KINDS, LayerSpec, spec_to_text
from reference.dialects.vllm.finding import look_up
from reference.dialects.vllm.records import Cache
from reference.hits import HasEntry, longest_hit_by_definition


@dataclasses.dataclass(frozen=True)
class HitCase:
    """A request and what the cache holds of its prefixes.

    Attributes:
      config: the cache; its pool has room for every entry.
      num_tokens: tokens of the request.
      entries: `(group, end)` of each entry, as `reference.hits.HasEntry` explains them; `end` is a multiple of
        `hash_block_size`.
    """

    config: VllmConfig
    num_tokens: int
    entries: frozenset[tuple[int, int]]

    @property
    def keyed(self) -> int:
        """Tokens of the longest prefix that has a key: whole hash blocks whose look-ahead tokens exist."""
        size = self.config.hash_block_size
        return max(0, self.num_tokens - self.config.hash_lookahead) // size * size

    def has_entry(self, group: int, end: int) -> bool:
        """True if the cache holds this entry and the request has the key to it."""
        return end <= self.keyed and (group, end) in self.entries

    def by_definition(self) -> int:
        """The longest hit, in tokens, as `reference.hits` defines it."""
        return longest_hit_by_definition(self.config, self.has_entry, self.num_tokens)

    def by_iteration(self) -> int:
        """The longest hit, in tokens, as vLLM 0.33's text finds it."""
        return self.looked_up()[0]

    def each_by_iteration(self) -> list[int]:
        """The hit that each group finds by itself, in tokens, as the text looks for it."""
        return self.looked_up(1)[1]

    def looked_up(self, connects: int = 0) -> tuple[int, list[int], list[int]]:
        """The hit; with `connects`, what each group finds by itself; and the columns of the hit in each."""
        cache, size = _cache(self.config, self.num_tokens), self.config.hash_block_size
        request, result, width = cache.requests[1], cache.results[1], cache.config.width
        request.tokens, request.keys = self.num_tokens, self.keyed // size
        held = [
            cache.entries[(end // size - 1) * width + group + 1] for group, end in self.entries if end <= self.keyed
        ]
        for entry in held:
            entry.first = cache.blocks[1]
        hit = look_up(cache, request, result, self.num_tokens - 1, connects)
        for entry in held:
            entry.first = None  # type: ignore[assignment]
        return hit, result.own[1 : width + 1], [row.found for row in request.rows[1 : width + 1]]

    def __str__(self) -> str:
        groups = [
            _group_text(spec, i in self.config.eagle_group_ids) for i, spec in enumerate(self.config.topology.specs)
        ]
        held = [[end for group, end in sorted(self.entries) if group == i] for i in range(len(groups))]
        inside = f", hits inside blocks of {self.config.hash_block_size}" if self.config.partial_hits else ""
        lookahead = f", look-ahead {self.config.hash_lookahead}" if self.config.hash_lookahead else ""
        parts = "; ".join(f"{text} holds {ends}" for text, ends in zip(groups, held, strict=True))
        return f"{self.num_tokens} tokens{inside}{lookahead}: {parts}"


@functools.lru_cache(maxsize=1)
def _cache(config: VllmConfig, tokens: int) -> Cache:
    """A cache that holds nothing, with a request whose keys are numbered."""
    keys = tokens // config.hash_block_size + 1
    few = dataclasses.replace(config, num_blocks=2)
    cache = empty(few, keys=keys, requests=1, tokens=tokens, events=False, explains=False, tells=False)
    cache.requests[1].chain[:keys] = range(keys)
    return cache


def has_entry(engine: PlainEngine, id: str) -> HasEntry:
    """Predicate on `(group, end)`: the text's pool holds that prefix of a request."""
    size, keys = engine.config.hash_block_size, engine.keys(id)

    def held(group: int, end: int) -> bool:
        return end % size == 0 and 0 < end <= len(keys) * size and engine.has(group, keys[end // size - 1])

    return held


def make_config(
    specs: list[LayerSpec],
    eagle_groups: list[int],
    hash_block_size: int | None = None,
    hash_lookahead: int = 0,
    context_parallel: int = 1,
) -> VllmConfig:
    """A cache of these groups, with the alignments vLLM 0.33 would derive.

    Args:
      specs: one per group.
      eagle_groups: those under the EAGLE drop; empty for none at all.
      hash_block_size: tokens; None for the largest that fits.
      hash_lookahead: tokens that a hash looks ahead.
      context_parallel: ranks that share the groups with `cp_sharded`.

    Raises:
      ConfigError: the dialect forbids it.
    """
    sizes = [manager_block(spec, context_parallel) for spec in specs]
    cacheable = [size for size, spec in zip(sizes, specs, strict=True) if spec.prefix_cacheable]
    size = math.gcd(*cacheable) if hash_block_size is None else hash_block_size
    return VllmConfig(
        topology=Topology.of_specs(specs, eagle_groups),
        num_blocks=1024,
        hash_block_size=size,
        scheduler_block_size=math.lcm(*sizes),
        hash_lookahead=hash_lookahead,
        eagle=bool(eagle_groups),
        partial_hits=derive_partial_hits(specs, size, context_parallel, caching=True),
        context_parallel=context_parallel,
    )


def draw_case(choices: Choices) -> HitCase:
    """A random case: 1 to 5 groups, unequal blocks, any EAGLE subset, up to four ranks, any set of entries."""
    config = None
    while config is None:
        config = _draw_config(choices)
    alignment = config.hash_block_size if config.partial_hits else config.scheduler_block_size
    num_tokens = choices.integer(1, 4 * alignment + 2)
    density = choices.pick((50, 70, 90, 97))
    ends = range(config.hash_block_size, num_tokens + 2 * config.scheduler_block_size, config.hash_block_size)
    entries = frozenset(
        (group, end)
        for group, spec in enumerate(config.topology.specs)
        for end in ends
        if _may_hold(config, group, spec, end) and choices.chance(density)
    )
    return HitCase(config, num_tokens, entries)


def _draw_config(choices: Choices) -> VllmConfig | None:
    count = choices.integer(1, 5)
    ranks = choices.pick((1, 1, 1, 2, 3, 4))
    family = choices.pick(((1, 2, 4), (1, 2), (2, 4, 8), (3, 6), (2, 3)))
    chunked = choices.chance(10)
    if chunked:
        family, ranks = (choices.pick((1, 2, 4)),), 1
    specs = [_draw_spec(choices, choices.pick(family), ranks, chunked) for _ in range(count)]
    if count > 1 and choices.chance(20):
        specs[-1] = specs[0]
    if not any(spec.prefix_cacheable for spec in specs):
        return None
    eagle = [i for i, spec in enumerate(specs) if kinds.layer(spec).droppable and choices.chance(50)]
    common = math.gcd(*(manager_block(spec, ranks) for spec in specs if spec.prefix_cacheable))
    size = choices.pick([size for size in range(1, common + 1) if common % size == 0]) if count > 1 else common
    lookahead = choices.pick((0, 0, 0, 1, 2))
    return make_config(specs, eagle if choices.chance(60) else [], size, lookahead, ranks)


def _draw_spec(choices: Choices, size: int, ranks: int, aligned: bool) -> LayerSpec:
    weights = {cls: cls.compared_weight(aligned) for cls in _kinds()}
    number = choices.integer(0, sum(weights.values()) - 1)
    for cls, weight in weights.items():
        if number < weight:
            return cls.draw_compared(choices, size, ranks)
        number -= weight
    raise AssertionError("a number below the sum of the weights")


def _kinds() -> list[type[kinds.VllmLayer]]:
    """Every kind, in a fixed order: those of one block last."""
    return sorted(map(kinds.of_kind, KINDS), key=lambda cls: (cls.of.one_block, cls.draw_place, cls.of.kind))


def _may_hold(config: VllmConfig, group: int, spec: LayerSpec, end: int) -> bool:
    """True if vLLM 0.33 ever registers such an entry: whole blocks, and partly filled ones of two kinds."""
    whole = end % config.block_size(group) == 0
    return spec.prefix_cacheable and (whole or kinds.layer(spec).registers_parts)


def small_cases(num_groups: int, num_tokens: int) -> Iterator[HitCase]:
    """Every case of `num_groups` groups of blocks of one or two tokens, for a request of `num_tokens` tokens.

    Layers are the smallest of each kind; any EAGLE subset; hash blocks of one token and larger; look-ahead 0 or 2;
    every set of entries that the request has keys for.
    """
    small = [spec for cls in _kinds() for spec in cls.smallest()]
    for specs in itertools.product(small, repeat=num_groups):
        for flags in itertools.product((False, True), repeat=num_groups):
            for lookahead in (0, 2):
                eagle = [i for i, flag in enumerate(flags) if flag]
                for config in _small_configs(list(specs), eagle, lookahead):
                    yield from _small_sets(config, num_tokens)


def _small_configs(specs: list[LayerSpec], eagle: list[int], lookahead: int) -> Iterator[VllmConfig]:
    for size in (1, 2):
        try:
            config = make_config(specs, eagle, size, lookahead)
            groups_of(config)  # as a cache is made of it
        except HKVError:
            continue
        yield config


def _small_sets(config: VllmConfig, num_tokens: int) -> Iterator[HitCase]:
    size = config.hash_block_size
    longest = max(0, num_tokens - config.hash_lookahead) // size * size
    possible = [
        (group, end)
        for group, spec in enumerate(config.topology.specs)
        for end in range(size, longest + 1, size)
        if _may_hold(config, group, spec, end) and (config.partial_hits or end % config.block_size(group) == 0)
    ]
    for count in range(len(possible) + 1):
        for entries in itertools.combinations(possible, count):
            yield HitCase(config, num_tokens, frozenset(entries))


def _group_text(spec: LayerSpec, eagle: bool) -> str:
    return spec_to_text(spec) + (" (sharded)" if spec.shared_by_ranks else "") + (" (EAGLE)" if eagle else "")


# Causes for which vLLM 0.33's fixed-point iteration may find another hit than the definition, by name.
#
# `docs/hits.md` explains each with its smallest example. Where none applies, the two are equal; tests hold that.


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
    windows = [group for group in joined if kinds.layer(group.spec).seeks_run]
    alone = len(config.topology.groups) == 1
    dropping = any(group.eagle and not group.spec.snapshot for group in joined)
    found: set[Cause] = set()
    if any(group.shared and not group.spec.snapshot for group in joined):
        found.add(Cause.SHARED_DROP)
    if alone and dropping and config.hash_lookahead == 0 and num_tokens % config.hash_block_size == 0:
        found.add(Cause.LONE_DROP)
    if not alone and any(group.eagle and group.block_size < config.hit_alignment for group in windows):
        found.add(Cause.SHORT_PREFIX_DROP)
    if config.partial_hits and _may_miss_a_longer_entry(config, joined, num_tokens):
        found.add(Cause.LONGER_ENTRY)
    asks = config.hash_lookahead or "window-one-never-hits" in config.bugs
    if asks and any(kinds.layer(group.spec).resumes_anywhere for group in windows):
        found.add(Cause.UNREAD_WINDOW)
    if _may_outrun_a_window(joined):
        found.add(Cause.DROP_NOT_REPEATED)
    if any(kinds.layer(spec).off_grid for spec in config.topology.specs):
        found.add(Cause.CHUNK_OFF_GRID)
    return frozenset(found)


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
    return len(dropping) > 1 and any(kinds.layer(spec).seeks_run for spec in dropping)
