"""A request as the second tier knows it: its chunks and their keys, what of it may be stored, and its jobs.

vLLM 0.33 `RequestOffloadState`, `TransferJobStatus`.
"""

from __future__ import annotations

import dataclasses

from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.plain import Context
from hkv.dialects.vllm.offload.plain import Name as Key
from reference.dialects.vllm.request import Request


@dataclasses.dataclass
class Job:
    """A job that goes on.

    Attributes:
      owner: its request.
      keys: its chunks.
      writes: whether it stores.
      left: reports that are still to come, one a worker.
      within: whether it loads within a step.
      read: blocks that it reads, fenced from the beginning: those of windows, which a request gives up while it runs.
      read_late: those fenced once the request has finished.
    """

    owner: Offloaded
    keys: list[Key]
    writes: bool
    left: int
    within: bool = False
    read: list[int] = dataclasses.field(default_factory=list)
    read_late: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Offloaded:
    """A request as the tier knows it.

    Attributes:
      config: the cache and its tier.
      request: as the cache knows it.
      load_limit: tokens that may be loaded for it; None for all.
      store_limit: tokens of it that may be stored; None for all.
      context: as the pool knows it.
      keys: of each group, keys of its whole chunks so far.
      blocks: of each group, its blocks as the steps told them; 0 for those it has given up.
      cursors: of each group, the chunk from which on it offers.
      local: tokens of its hit on the GPU at the last lookup.
      tail: end of the tail inside a block that the last lookup found, until it is loaded.
      loaded: whether a load of it was ever ordered.
      jobs: numbers of those that go on.
      finished: whether it has finished, aborted ones too.
      aborted: whether it was aborted.
      told: whether a step has told that it finished.
    """

    config: OffloadConfig
    request: Request
    load_limit: int | None = None
    store_limit: int | None = None
    context: Context = dataclasses.field(default_factory=Context)
    keys: list[list[Key]] = dataclasses.field(init=False)
    blocks: list[list[int]] = dataclasses.field(init=False)
    cursors: list[int] = dataclasses.field(init=False)
    local: int = 0
    tail: int | None = None
    loaded: bool = False
    jobs: set[int] = dataclasses.field(default_factory=set)
    finished: bool = False
    aborted: bool = False
    told: bool = False

    def __post_init__(self) -> None:
        groups = len(self.config.chunk_tokens)
        self.keys, self.blocks, self.cursors = [[] for _ in range(groups)], [[] for _ in range(groups)], [0] * groups

    def prefix(self, group: int, tokens: int) -> Key:
        """The key of a group's part of a prefix."""
        key = (self.request.keys[tokens // self.config.cache.hash_block_size - 1], group)
        self.context.positions[key] = tokens
        return key

    def name_chunks(self) -> None:
        """Names the chunks that have become whole."""
        for group, size in enumerate(self.config.chunk_tokens):
            hashes, known = size // self.config.cache.hash_block_size, self.keys[group]
            for last in range((len(known) + 1) * hashes - 1, len(self.request.keys), hashes):
                known.append((self.request.keys[last], group))
                self.context.positions[known[-1]] = len(known) * size

    def storable_tokens(self, computed: int) -> int:
        """Tokens that may be stored, of so many that are computed."""
        limits = [computed, self.request.num_tokens]
        if self.store_limit is not None:
            limits.append(self.store_limit)
        if self.config.prompt_only:
            limits.append(self.request.num_prompt)
        return min(limits)

    def storable_chunks(self, group: int, tokens: int) -> int:
        """Chunks that may be stored: whole, allocated, named; not a draft's last one while it may be written again."""
        count = tokens // self.config.chunk_tokens[group]
        if group in self.config.eagle and tokens > self.request.num_prompt and not self.finished:
            count = max(0, count - 1)
        return min(count, len(self.blocks[group]) // self.config.blocks_per_chunk, len(self.keys[group]))
