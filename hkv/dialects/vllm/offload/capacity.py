"""Room of a second tier: chunks that a prompt takes in it, and tokens that it holds.

All groups share one pool of chunks. Full attention takes a chunk for each whole one of a prompt, a window those before
lengths that loads can end at, a recurrent group its states. vLLM 0.33 reports `cpu_kv_cache_size_tokens` as if a window
took as many chunks as a lookup asks for, though without retention it is stored whole.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from hkv.dialects.vllm.offload.config import BUGS, OffloadConfig, chunk_bytes
from hkv.dialects.vllm.planning.cache_plan import CachePlan, copies_in_a_chunk
from hkv.errors import ConfigError, PlanError
from hkv.model.topology import Topology


@dataclasses.dataclass(frozen=True)
class PlannedTier:
    """A second tier of a planned cache, its longest prompts of `longest` tokens.

    `chunk_bytes` are those of a block of any group on the workers that have their own, rounded up to pages.
    """

    config: OffloadConfig
    chunk_bytes: int
    longest: int

    def record(self) -> dict[str, Any]:
        """Plain values, for `hkv plan --json`."""
        return {
            "num_chunks": self.config.num_chunks,
            "chunk_bytes": self.chunk_bytes,
            "tokens_per_chunk": list(self.config.chunk_tokens),
            "chunks_of_longest_prompt": list(stored_chunks(self.config, self.longest)),
            "longest_prompt_that_fits": longest_prompt(self.config, self.longest),
            "tokens": held_tokens(self.config, self.longest),
            "cpu_kv_cache_size_tokens": reported_tokens(self.config, self.longest),
        }


def planned_tier(plan: CachePlan, gib: float) -> PlannedTier:
    """The tier in so many GiB of host memory, of all GPUs of an engine, behind a planned cache, as vLLM makes it.

    Raises:
      PlanError: a model that caches nothing.
      ConfigError: less memory than a chunk takes; a cache that vLLM offloads nothing of.
    """
    served, ranks = plan.served.plan, plan.model.tensor_parallel
    if not served.groups:
        raise PlanError("kv_offloading_size", gib, "none: the model caches nothing")
    chunk = chunk_bytes(served.workers[0].bytes_per_block, copies_in_a_chunk(served, ranks), 1)
    size, cache = int(gib * 2**30), plan.config()
    if size < chunk:
        raise ConfigError("kv_offloading_size", gib, f"at least a chunk of {chunk:,} bytes, in GiB")
    config = OffloadConfig(
        cache=dataclasses.replace(
            cache,
            topology=Topology.of_specs(cache.topology.specs, cache.eagle_group_ids),
            eagle=bool(cache.eagle_group_ids),
            retention_interval=0,
            offloads=any(spec.keeps_states for spec in cache.topology.specs),
        ),
        num_chunks=size // chunk,
        workers=ranks * len(served.workers),
        step_tokens=plan.settings.max_num_batched_tokens,
        eagle=cache.eagle_group_ids,
        drafts=int(bool(cache.eagle_group_ids)),
        bugs=frozenset(BUGS),
    )
    return PlannedTier(config, chunk, cache.max_model_len)


def stored_chunks(config: OffloadConfig, tokens: int) -> tuple[int, ...]:
    """Chunks of each group that a prompt of so many tokens, stored alone, takes."""
    return tuple(_stored(config, group, tokens) for group in range(len(config.chunk_tokens)))


def reported_tokens(config: OffloadConfig, longest: int) -> int:
    """Tokens that vLLM says the tier holds (`cpu_kv_cache_size_tokens`): by chunks that loads of the longest ask."""
    asked = 0
    for group, size in enumerate(config.chunk_tokens):
        whole, window = -(-longest // size), config.window(group)
        asked += whole if window is None else min(whole, window)
    return config.num_chunks * longest // asked


def held_tokens(config: OffloadConfig, longest: int) -> int:
    """Tokens that the tier holds of prompts of the longest length, by the chunks that are stored of one."""
    return config.num_chunks * longest // max(1, sum(stored_chunks(config, longest)))


def longest_prompt(config: OffloadConfig, most: int) -> int:
    """Tokens of the longest prompt, `most` at most, all of whose chunks fit into the tier."""
    unit = min(config.chunk_tokens)
    over = bisect.bisect_right(
        range(0, most + unit, unit), config.num_chunks, key=lambda tokens: sum(stored_chunks(config, tokens))
    )
    return min(most, over * unit - 1)


def _stored(config: OffloadConfig, group: int, tokens: int) -> int:
    """Chunks of a group that a prompt of so many tokens, computed in whole steps, takes."""
    kept, dense = len(kept_chunks(config, group, tokens)), config.cache.retention_interval is None
    return min(kept, -(-tokens // config.step_tokens)) if group in config.aligned and dense else kept


def kept_chunks(config: OffloadConfig, group: int, tokens: int, shared: int = 0) -> Collection[int]:
    """Chunks of a group that are stored of a prompt of so many tokens, where the cache has them to store.

    `reference.dialects.vllm.offload.offers` asks for each block. Of a recurrent group they are those whose states the
    cache keeps, if a step ends there. `shared` are tokens up to which others were seen to share the prompt, or 0.
    """
    most, per_chunk = tokens // config.chunk_tokens[group], config.blocks_per_chunk
    if _is_whole(config, group):
        return range(most)
    found = set[int]()
    for first, end in _tails(config, group, tokens, shared):
        found.update(range(max(0, first // per_chunk), min(most, -(-end // per_chunk))))
    return found


def _tails(config: OffloadConfig, group: int, tokens: int, shared: int) -> Iterator[tuple[int, int]]:
    """Blocks that are stored of a prompt: the first and the one behind the last of each tail."""
    interval, size, recurrent = config.cache.retention_interval, config.cache.block_size(group), group in config.aligned
    alignment = config.cache.hit_alignment if recurrent else config.alignment
    assert alignment is not None
    drops, need = 0 if recurrent else int(group in config.eagle), 1 if recurrent else _kept(config, group)
    period = (alignment if interval is None else interval) // size
    if period:
        for end in range(period + drops, tokens // size + period + drops, period):
            yield end - need, end
    if interval is not None:
        last = config.resumes_at(tokens)
        for boundary in (last, shared) if shared else (last,):
            end = boundary // alignment * alignment // size + drops
            yield end - need, end
    elif not drops:
        end = tokens // config.chunk_tokens[group] * config.blocks_per_chunk
        yield max(end - end % period, end - need), end


def _kept(config: OffloadConfig, group: int) -> int:
    """Blocks before a length that a window stores; 0 for other groups."""
    span = config.span(group)
    return 0 if span is None else -(-span // config.cache.block_size(group)) + (group in config.eagle)


def _is_whole(config: OffloadConfig, group: int) -> bool:
    """True if every chunk of a group is stored: but for windows and states whose tails leave some out."""
    interval, alignment, size = config.cache.retention_interval, config.alignment, config.cache.block_size(group)
    if group in config.aligned:
        return interval is None or 0 < interval <= size
    if config.span(group) is None or alignment is None or alignment % size:
        return True
    segment = alignment if interval is None else interval
    return bool(segment) and _kept(config, group) >= segment // size
