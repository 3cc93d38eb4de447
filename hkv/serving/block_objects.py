"""Rules of vLLM 0.33's own offloading for `store` and `load`: an object is one block of one group.

Of a prompt that is stored which its retention keeps, and a load begins where the cache's own hit ends. The longest
prefix is found as vLLM finds it (`OffloadingConnectorScheduler._lookup_complete_chunks`), for lengths at which `arrive`
resumes, and nothing is on its way: a store and a load are done when they return.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from hkv.cache.spans import leaves_states
from hkv.chunks.kernel_groups import EngineGroupInfo
from hkv.chunks.objects import ObjectGroup, object_layout
from hkv.dialects.vllm.offload.capacity import kept_chunks
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.errors import ConfigError
from hkv.serving.objects import ChunkObjects, Entry, kernel_groups
from hkv.serving.serving import Serving


def block_objects(serving: Serving, rules: OffloadConfig) -> ChunkObjects:
    """The objects of a cache: one for each block of each group, with the parts of all of its layers.

    Raises:
      ConfigError: rules of another cache; chunks of several blocks, decoded tokens, a draft's groups, tails inside
        blocks; a cache in which chunks leave states behind inside them.
    """
    if tuple(rules.cache.block_sizes) != tuple(serving.cache.block_sizes):
        raise ConfigError("rules", list(rules.cache.block_sizes), f"blocks of {list(serving.cache.block_sizes)}")
    for name, value in (("blocks_per_chunk", 1), ("prompt_only", True), ("eagle", ()), ("tails", False)):
        if getattr(rules, name) != value:
            raise ConfigError(f"rules.{name}", getattr(rules, name), f"{value}, as vLLM has it by default")
    if leaves_states(serving.cache.state):
        raise ConfigError("num_prefill_checkpoint_blocks", 1, "0: states at the ends of their blocks alone")
    entries = []
    for group, size in enumerate(rules.chunk_tokens):
        infos = [EngineGroupInfo(each, (), size) if each == group else None for each in range(len(rules.chunk_tokens))]
        kernels, members = kernel_groups(serving.layers, infos, size, whole=True)
        layout = object_layout(kernels, ObjectGroup(tuple(range(len(kernels))), -1, "attention"), size)
        entries.append(Entry(tuple(members), -1, layout, size))
    told = [
        [(member.part, [layer.name for layer in member.layers]) for member in entry.members]
        + [(*region.shape, region.dtype) for region in entry.layout.regions]
        for entry in entries
    ]
    digest = hashlib.sha256(repr(("blocks", rules.chunk_tokens, told)).encode()).digest()[:16]
    return ChunkObjects(int(np.lcm.reduce(rules.chunk_tokens)), tuple(entries), digest)


def offered(rules: OffloadConfig, prompt: int, computed: int, shared: int) -> list[list[int]]:
    """Chunks of each group that are stored of a prompt of which so many tokens are computed.

    `shared` are tokens up to which others were seen to share it, or 0.
    """
    return [
        [chunk for chunk in sorted(kept_chunks(rules, group, prompt, shared)) if (chunk + 1) * size <= computed]
        for group, size in enumerate(rules.chunk_tokens)
    ]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Tokens up to which a prefix is there after a load, those on the GPU among them, and of each group its chunks."""

    end: int
    chunks: tuple[range, ...]


def longest_load(rules: OffloadConfig, present: Sequence[Collection[int]], local: int, tokens: int) -> Loaded | None:
    """The longest load behind a hit of `local` tokens at whose end `arrive` resumes; None where nothing can be loaded.

    Args:
      rules: the tier's configuration.
      present: of each group, the chunks that the tier has.
      local: tokens of the hit on the GPU.
      tokens: of the prompt, whose last one is always computed.
    """
    unit = rules.cache.scheduler_block_size
    most = (tokens - 1) // unit * unit
    while (end := _longest(rules, present, local, most)) is not None and end % unit:
        most = end - end % unit  # vLLM resumes inside a block, whose tokens it has loaded
    if end is None:
        return None
    chunks = []
    for group, size in enumerate(rules.chunk_tokens):
        window, last = rules.load_window(group, end), end // size
        chunks.append(range(local // size if window is None else max(local // size, last - window), last))
    return Loaded(end, tuple(chunks))


def _longest(rules: OffloadConfig, present: Sequence[Collection[int]], local: int, most: int) -> int | None:
    """Tokens, `most` at most, up to which every group can be resumed; None where that is not a chunk beyond `local`.

    Full attention is looked at first; whatever shortens the length behind a window has all windows looked at again.
    """
    groups, previous = rules.lookup_order, 0
    while groups:
        again, windows = False, False
        for group in groups:
            size, window = rules.chunk_tokens[group], rules.window(group)
            if most - local < size:
                return None
            count = _resumable(rules, present[group], group, local // size, most)
            most = min(most, (local // size + count) * size)
            if not count or most - local < size:
                return None
            again |= most < previous and windows
            windows |= window is not None
            previous = most
        groups = rules.windows if again else ()
    return most


def _resumable(rules: OffloadConfig, present: Collection[int], group: int, start: int, most: int) -> int:
    """Chunks from `start` on behind which a group can be resumed, those that hold the first `most` tokens at most."""
    end, window = -(-most // rules.chunk_tokens[group]), rules.window(group)
    if window is None:
        return next((chunk for chunk in range(start, end) if chunk not in present), end) - start
    need, run = rules.load_window(group, most), 0
    for chunk in reversed(range(start, end)):
        if chunk not in present:
            need, run = window, 0
            continue
        run += 1
        if run == need:
            return chunk + run - start
    return run
