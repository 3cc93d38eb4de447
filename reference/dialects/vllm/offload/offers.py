"""Chunks of a request that a step offers to the second tier, and blocks of it that are handed over to be stored.

Full attention offers every chunk. A window needs few chunks before the lengths that loads can end at: the boundaries of
full attention's chunks, or those that retention leaves, and the end of the prompt. Recurrent states are offered as the
cache hands them over, and with them the end of a prompt inside a block. vLLM 0.33
`OffloadingConnectorScheduler._build_store_jobs` and the managers' `reachable_block_mask`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hkv.dialects.vllm.offload.config import TAIL_PAST_LIMIT, OffloadConfig
from hkv.dialects.vllm.offload.plain import Name as Key
from hkv.errors import EngineFailure
from reference.dialects.vllm.offload.offloaded import Offloaded
from reference.dialects.vllm.request import Request
from reference.dialects.vllm.retention import tail_mask


class Progress(NamedTuple):
    """Progress of a request, in chunks of one group.

    Attributes:
      finished: whether it has finished.
      chunks: those that may be stored.
      prompt: chunks of its prompt that may be.
      cursor: chunk from which on it offers.
    """

    finished: bool
    chunks: int
    prompt: int
    cursor: int


def offered_chunks(
    config: OffloadConfig, request: Request, group: int, blocks: Sequence[int], progress: Progress
) -> tuple[int, list[int]]:
    """First chunk that is looked at, and those that are offered.

    Args:
      config: the cache and its tier.
      request: the request.
      group: the group.
      blocks: the request's blocks in it, 0 for those it has given up.
      progress: how far the request is.
    """
    per_chunk, dense = config.blocks_per_chunk, config.cache.retention_interval is None
    alignment = _final_alignment(config, group)
    again = progress.finished and progress.chunks != progress.prompt and dense and alignment is not None
    if not dense or group in config.eagle:
        horizon = None
    elif progress.finished:
        horizon = progress.chunks
    else:
        horizon = progress.prompt if progress.chunks <= progress.prompt else None
    start = progress.cursor
    if again:
        assert alignment is not None
        end = progress.chunks * per_chunk
        start = min(start, (end - end % alignment) // per_chunk)
    if group in config.aligned or progress.chunks <= start:
        return start, []
    mask = _mask(config, request, group, start, progress.chunks, horizon)
    known = _mask(config, request, group, start, progress.chunks, progress.prompt) if again else None
    offered = []
    for place in range(start, progress.chunks):
        columns = range(place * per_chunk, (place + 1) * per_chunk)
        kept = [mask is None or mask[column - start * per_chunk] for column in columns]
        if not blocks[columns[-1]] or not any(kept):
            continue
        if (
            again
            and place < progress.cursor
            and (known is None or any(known[at - start * per_chunk] for at in columns))
        ):
            continue
        if all(blocks[column] or not keep for column, keep in zip(columns, kept, strict=True)):
            offered.append(place)
    return start, offered


def _final_alignment(config: OffloadConfig, group: int) -> int | None:
    """Blocks between two boundaries, where the tail of a request's end can be told from them."""
    size = config.cache.block_size(group)
    if config.alignment is None or group in config.eagle or config.span(group) is None or config.alignment % size:
        return None
    return config.alignment // size


def _mask(
    config: OffloadConfig, request: Request, group: int, start: int, end: int, horizon: int | None
) -> list[bool] | None:
    """Blocks of some chunks that a load may need; None for all of them.

    `horizon` is the chunk at which the request's last segment ends, None where its tail does not count.
    """
    span, size, alignment = config.span(group), config.cache.block_size(group), config.alignment
    if span is None or alignment is None or alignment % size:
        return None
    interval, drops = config.cache.retention_interval, group in config.eagle
    need, per_chunk = -(-span // size) + drops, config.blocks_per_chunk
    columns = range(start * per_chunk, end * per_chunk)
    segment = alignment if interval is None else interval or None
    boundaries: list[int] = []
    if interval is not None:
        boundaries = [config.resumes_at(request.num_prompt)] + [request.shared_prefix] * bool(request.shared_prefix)
    mask = tail_mask(columns, segment, need, int(drops), boundaries, size, alignment)
    if mask is None or segment is None or horizon is None or drops:
        return mask
    last, period = horizon * per_chunk, segment // size
    for column in range(max(last - last % period, last - need), last):
        if column in columns:
            mask[column - columns.start] = True
    return mask


# States, and ends of prompts inside blocks.


class Handed(NamedTuple):
    """Blocks to be stored, one of each of some groups: their keys, their column, and the block of each group."""

    keys: list[Key]
    column: int
    blocks: Mapping[int, int]


def handed_states(state: Offloaded, entries: Sequence[tuple[int, int, int]]) -> Iterator[Handed]:
    """Of the states of a request that the cache hands over, (group, block, tokens), those at the ends of chunks."""
    config = state.config
    for group, block, length in entries:
        whole = length % config.chunk_tokens[group] == 0
        if block and whole and length <= state.storable_tokens(state.request.num_tokens):
            column = length // config.cache.block_size(group) - 1
            yield Handed([state.prefix(group, length)], column, {group: block})


def handed_tail(state: Offloaded, entries: Sequence[tuple[int, int, int]], scheduled: int) -> Handed | None:
    """The end of a prompt inside a block, of all groups together, as the states there are handed over.

    With a draft's layers, only of requests that were loaded for: others leave their tail to the GPU's cache.

    Args:
      state: the request.
      entries: what the cache hands over of it, (group, block, tokens).
      scheduled: tokens of the step.
    """
    config, size = state.config, state.config.chunk_tokens[0]
    groups = range(len(config.chunk_tokens))
    proof, handed = max(map(config.proof, groups)), {group: block for group, block, length in entries if length % size}
    if not handed or (proof and not state.loaded):
        return None
    (end,) = {length for _, _, length in entries if length % size}
    if _beyond_limit(state, end):
        return None
    computed = min(state.request.num_computed + scheduled, state.request.num_prompt)
    rows = [row for group, row in enumerate(state.blocks) if group not in config.aligned]
    if (proof and end + proof > computed) or any(end // size >= len(row) for row in rows):
        return None
    keys = [state.prefix(group, end + config.proof(group)) for group in groups]
    blocks = {group: handed[group] if group in config.aligned else state.blocks[group][end // size] for group in groups}
    return Handed(keys, end // size, blocks)


def _beyond_limit(state: Offloaded, end: int) -> bool:
    """True if a tail is more than may be stored of its request."""
    beyond = state.store_limit is not None and end > state.store_limit
    if beyond and TAIL_PAST_LIMIT in state.config.bugs:
        if state.store_limit:
            raise EngineFailure("store_limit", state.store_limit, f"at least the {end} tokens up to the tail")
        return False
    return beyond
