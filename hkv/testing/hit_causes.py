"""Why vLLM 0.33's fixed-point iteration may find another hit than the definition: the causes, by name.

`docs/hits.md` explains each with its smallest example. Where none applies, the two are equal; tests hold that.
"""

from __future__ import annotations

import enum

from hkv.dialects.vllm.config import FULL_FAMILY, VllmConfig
from hkv.spec import ChunkedLocal, LayerSpec, SlidingWindow


class Cause(enum.Enum):
    """A reason for a difference; the value says which way it goes and what is needed for it."""

    SHARED_DROP = "less: an EAGLE group has a twin of equal spec that is none, and the twin must drop too"
    LONE_DROP = "less: the only group is an EAGLE group, and the block that it drops would end at the request's end"
    SHORT_PREFIX_DROP = "less: an EAGLE window with blocks smaller than the alignment is rounded down before it drops"
    END_OF_REQUEST = "less: an entry that ends at the request's end is not looked at, though a shorter hit lies in it"
    KEYLESS_WINDOW = "less: a window of one token needs no entry, but only lengths that have a key are tried"
    DROP_NOT_REPEATED = "more: an EAGLE window has dropped, then a later EAGLE group shortens the hit, and it need not anew"
    CHUNK_OFF_GRID = "more: chunks do not start at blocks, and the block in which one starts is not looked at"

    @property
    def direction(self) -> str:
        """`less` or `more`: what the iteration finds, compared with the definition."""
        return self.value.partition(":")[0]


def causes(config: VllmConfig, num_tokens: int) -> frozenset[Cause]:
    """The causes that can make a difference for a request of `num_tokens` tokens under this configuration."""
    if not config.caching:
        return frozenset()
    joined = _spec_groups(config)
    windows = [(spec, eagle) for spec, eagle, _ in joined if isinstance(spec, SlidingWindow)]
    alone = len(config.topology.groups) == 1
    found: set[Cause] = set()
    if any(twins and not spec.snapshot for spec, _, twins in joined):
        found.add(Cause.SHARED_DROP)
    if alone and joined and joined[0][1] and not joined[0][0].snapshot and num_tokens % config.hash_block_size == 0:
        found.add(Cause.LONE_DROP)
    if not alone and any(eagle and spec.block_size < _alignment(config) for spec, eagle in windows):
        found.add(Cause.SHORT_PREFIX_DROP)
    if config.partial_hits and num_tokens % config.hash_block_size == 0 and _looks_inside_blocks(config):
        found.add(Cause.END_OF_REQUEST)
    if config.hash_lookahead and any(spec.window == 1 for spec, _ in windows):
        found.add(Cause.KEYLESS_WINDOW)
    if _may_outrun_a_window(joined):
        found.add(Cause.DROP_NOT_REPEATED)
    if any(isinstance(spec, ChunkedLocal) and spec.chunk % spec.block_size for spec, _, _ in joined):
        found.add(Cause.CHUNK_OFF_GRID)
    return frozenset(found)


def _alignment(config: VllmConfig) -> int:
    return config.hash_block_size if config.partial_hits else config.scheduler_block_size


def _spec_groups(config: VllmConfig) -> list[tuple[LayerSpec, bool, bool]]:
    """Distinct specs in the order of lookup, whether the drop applies, and whether to some member only by way of a twin."""
    flags: dict[LayerSpec, list[bool]] = {}
    for index, group in enumerate(config.topology.groups):
        if group.spec.prefix_cacheable:
            flags.setdefault(group.spec, []).append(index in config.eagle_group_ids)
    ordered = sorted(flags, key=lambda spec: spec.kind not in FULL_FAMILY)
    return [(spec, any(flags[spec]), any(flags[spec]) and not all(flags[spec])) for spec in ordered]


def _looks_inside_blocks(config: VllmConfig) -> bool:
    groups = enumerate(config.topology.groups)
    return any(group.spec.kind in FULL_FAMILY and config.block_size(i) > config.hash_block_size for i, group in groups)


def _may_outrun_a_window(joined: list[tuple[LayerSpec, bool, bool]]) -> bool:
    dropping = [spec for spec, eagle, _ in joined if eagle and spec.kind not in FULL_FAMILY]
    return any(isinstance(spec, SlidingWindow) for spec in dropping[:-1])
