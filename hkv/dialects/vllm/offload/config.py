"""Configuration of vLLM's second tier and of the cache it stands behind, and the sizes that follow from both.

A chunk is `blocks_per_chunk` blocks of one group, on all workers. Lengths are tokens unless they say chunks or blocks.
vLLM 0.33 `build_offloading_config`, `SchedulerOffloadConfig`, `CPUOffloadingSpec`.
"""

from __future__ import annotations

import dataclasses
import functools

from hkv.contract.bugs import Bug, check_bugs, listed
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.bugs import BUGS as VLLM_BUGS
from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError, UnsupportedConfigError

PAGE = 4096
"""Bytes to which a chunk is rounded up (`mmap.PAGESIZE`)."""

NATIVE, SIMPLE = CONNECTORS = ("native", "simple")
"""`OffloadingConnector`, and `SimpleCPUOffloadConnector` (`VLLM_USE_SIMPLE_KV_OFFLOAD`)."""

POLICIES = ("lru", "arc")
"""`eviction_policy`."""


RESET_REVIVES, WINDOW_PAST_CHUNK, DROP_PAST_TAIL, HEAD_AGES, OWN_HEAD, ALL_OR_NOTHING, TAIL_PAST_LIMIT, *LAZY = (
    "reset-revives-window-blocks",
    "window-past-a-chunk-never-hits",
    "draft-drop-misses-window-tail",
    "head-ages-while-tail-loads",
    "tail-evicts-its-own-head",
    "step-beyond-the-tier-stores-nothing",
    "tail-past-the-limit",
    "lazy-walk-goes-on",
    "lazy-store-renews",
)
LAZY_WALK, LAZY_RENEWS = LAZY

OF_THE_CACHE = OFFER_OUTLIVES, EXTERNAL_NOT_COUNTED, COPIED_BEFORE_WRITTEN = (
    "offer-outlives-state",
    "external-state-not-counted",
    "copied-before-written",
)
"""Defects of the cache in front, which hands the tier states, makes room for those that are loaded, and copies blocks
that a hit ends in."""

BUGS = listed(
    Bug(
        name=RESET_REVIVES,
        engine="vLLM 0.33 OffloadingConnectorScheduler.reset_cache, _update_req_states",
        contract="a chunk is stored from blocks that still hold its tokens",
        behaviour="a running request offers everything again after a reset, a window's from blocks that it gave up and "
        "that were handed out since: other tokens are stored under its keys, or the job's end is a KeyError",
        part="manager",
    ),
    Bug(
        name=WINDOW_PAST_CHUNK,
        engine="vLLM 0.33 get_sliding_window_size_in_chunks",
        contract="a window's chunks that are stored for a boundary are enough to resume there",
        behaviour="of a window of one token more than whole chunks, a lookup asks for one chunk more than is stored: "
        "what was stored is hardly ever found",
        part="manager",
    ),
    Bug(
        name=DROP_PAST_TAIL,
        engine="vLLM 0.33 OffloadingConnectorScheduler._build_store_jobs",
        contract="a window's chunks that are stored for a boundary are enough to resume there",
        behaviour="the tail that retention leaves of a prompt ends with its last whole chunk, whether or not a draft's "
        "layers are there: a lookup drops their last chunk, and of the window before that the first was not stored",
        part="manager",
    ),
    Bug(
        name=HEAD_AGES,
        engine="vLLM 0.33 OffloadingConnectorScheduler.update_state_after_alloc",
        contract="a prompt's head is used whenever its tail is",
        behaviour="where the GPU has the head and the tier loads the tail, the tail alone counts as used: the head is "
        "evicted first, and then nothing can begin",
        part="manager",
    ),
    Bug(
        name=OWN_HEAD,
        engine="vLLM 0.33 CPUOffloadingManager.prepare_store",
        contract="what a request stores does not push out what it has stored or used itself",
        behaviour="of a prompt longer than the tier the head leaves for the tail, whose last chunks are being written: "
        "what is left begins nothing",
        part="manager",
    ),
    Bug(
        name=ALL_OR_NOTHING,
        engine="vLLM 0.33 OffloadingConnectorScheduler._build_store_jobs",
        contract="a step stores what there is room for, from the prompt's beginning on, and offers it once",
        behaviour="a step with more new chunks than can be made free stores none of them, and all are offered again in "
        "every step from then on, with a warning each",
        part="manager",
    ),
    Bug(
        name=TAIL_PAST_LIMIT,
        engine="vLLM 0.33 OffloadingConnectorScheduler._build_partial_tail_store_jobs",
        contract="of a request no more is stored than its max_offload_tokens",
        behaviour="where a prompt's tail inside a block lies beyond the limit, an assertion ends the engine; with a "
        "limit of 0 the tail is stored",
        part="manager",
    ),
    Bug(
        name=LAZY_WALK,
        engine="vLLM 0.33 SimpleCPUOffloadScheduler._prepare_lazy_store_specs",
        contract="a free block is stored when no more than so many are handed out before it",
        behaviour="a walk through the free blocks goes on where the last one ended, as many blocks again with each "
        "step: all of them are stored, those that nothing threatens, too, and a smaller tier is written in circles",
        part="manager",
    ),
    Bug(
        name=LAZY_RENEWS,
        engine="vLLM 0.33 SimpleCPUOffloadScheduler._process_store_completion",
        contract="a copy of a block is no use of it: the GPU's order of eviction stays",
        behaviour="a free block that was stored because it would be handed out next becomes the last one, and others, "
        "used later and not stored, are handed out before it",
        part="manager",
    ),
    *(VLLM_BUGS[name] for name in OF_THE_CACHE),
)
"""Defects of vLLM 0.33.0's offloading, and of the cache in front of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """A cache with a second tier.

    Attributes:
      cache: the first tier.
      num_chunks: chunks of the second; of the simple one blocks, as the GPU's, the first of which stands for none.
      connector: one of `CONNECTORS`. The simple one has no chunks of several blocks, policy, threshold, limit to
        prompts or loads within steps.
      lazy: whether the simple one stores what the GPU is about to hand out (`lazy_offload`), not what is computed.
      blocks_per_chunk: blocks of a group that one chunk holds.
      policy: `lru` or `arc`.
      threshold: offers of a chunk from which on it is stored (`store_threshold`); below 2 at once.
      tracked: chunks whose offers are counted at most (`max_tracker_size`).
      prompt_only: whether prompts alone are stored (`offload_prompt_only`).
      workers: workers that report each job (TP x PP).
      sync_tokens: tokens that may be loaded within a step (`sync_load_budget_bytes`, in tokens).
      step_tokens: tokens of a step (`max_num_batched_tokens`); as many as requests run, at least, as vLLM demands.
      most_running: requests that run at a time (`max_num_seqs`).
      eagle: groups of a draft's layers, whose last chunk is not settled.
      drafts: tokens that a draft proposes each step (`num_speculative_tokens`); hits on the GPU then drop a block.
      bugs: names of defects that are reproduced.
    """

    cache: VllmConfig
    num_chunks: int
    connector: str = NATIVE
    lazy: bool = False
    blocks_per_chunk: int = 1
    policy: str = "lru"
    threshold: int = 0
    tracked: int = 64_000
    prompt_only: bool = True
    workers: int = 1
    sync_tokens: int = 0
    step_tokens: int = 64
    most_running: int = 8
    eagle: tuple[int, ...] = ()
    drafts: int = 0
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("num_chunks", "blocks_per_chunk", "tracked", "workers", "step_tokens", "most_running"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        for name in ("threshold", "sync_tokens", "drafts"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "at least 0")
        if self.step_tokens < self.most_running:
            raise ConfigError("step_tokens", self.step_tokens, f"at least the {self.most_running} that run at a time")
        if self.policy not in POLICIES:
            raise ConfigError("policy", self.policy, f"one of {', '.join(POLICIES)}")
        if any(not 0 <= group < len(self.chunk_tokens) for group in self.eagle):
            raise ConfigError("eagle", list(self.eagle), "groups of the cache")
        check_bugs(self.bugs, BUGS)
        self._check_groups()
        if self.connector not in CONNECTORS:
            raise ConfigError("connector", self.connector, f"one of {', '.join(CONNECTORS)}")
        if self.connector == SIMPLE:
            self._check_simple()
        elif self.lazy:
            raise ConfigError("lazy", True, f"false of the connector {self.connector}")

    def _check_simple(self) -> None:
        plain = {"blocks_per_chunk": 1, "policy": "lru", "threshold": 0, "prompt_only": False, "sync_tokens": 0}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ConfigError(name, getattr(self, name), f"{value} of the connector {SIMPLE}")
        if not any(spec.reads_all for spec in self.cache.topology.specs):
            raise ConfigError("groups", len(self.chunk_tokens), f"one of full attention: the connector {SIMPLE}")

    def _check_groups(self) -> None:
        cache = self.cache
        if not cache.caching or cache.context_parallel > 1:
            raise UnsupportedConfigError("cache", "no caching, or ranks", "prefix caching on one rank")
        if cache.eagle != bool(self.drafts):
            raise ConfigError("drafts", self.drafts, f"{'at least 1' if cache.eagle else 0}: eagle is {cache.eagle}")
        for group, spec in enumerate(cache.topology.specs):
            known = spec.reads_all or spec.snapshot or spec.most_read
            if not known or not spec.prefix_cacheable or kinds.layer(spec).vllm_name is None:
                raise UnsupportedConfigError(f"groups[{group}].kind", spec.kind, "a kind whose offloading is ruled")
        interval = cache.retention_interval
        for group, size in enumerate(self.chunk_tokens):
            if interval is not None and self.window(group) is not None and interval % size:
                raise ConfigError("retention_interval", interval, f"a multiple of group {group}'s chunk of {size}")
        if len({self.chunk_tokens[group] for group in self.aligned}) > 1:
            raise ConfigError("groups", list(self.chunk_tokens), "recurrent groups with chunks of one size")

    @functools.cached_property
    def chunk_tokens(self) -> tuple[int, ...]:
        """Tokens of a chunk of each group."""
        return tuple(size * self.blocks_per_chunk for size in self.cache.block_sizes)

    def span(self, group: int) -> int | None:
        """Tokens before a query that a sliding window keeps; None for other groups."""
        spec = self.cache.topology.specs[group]
        return spec.most_read - 1 + kinds.layer(spec).kept_beyond if spec.slides else None

    def window(self, group: int) -> int | None:
        """Chunks before a length that resuming there takes (`get_sliding_window_size_in_chunks`); None for all."""
        spec, size = self.cache.topology.specs[group], self.chunk_tokens[group]
        if (span := self.span(group)) is not None:
            needed = max(1, -(-span // size))
            return max(needed, -(-spec.most_read // size)) if WINDOW_PAST_CHUNK in self.bugs else needed
        if spec.most_read:  # chunks of tokens that are attended to alone
            return -(-spec.most_read // size)
        return 1 if spec.snapshot else None

    def resumes_at(self, prompt: int) -> int:
        """Most tokens at which a prompt that comes again can resume, before they are aligned (`replay_boundaries`).

        The last token is computed again, and what a draft's group gives up has to be behind them.
        """
        if DROP_PAST_TAIL in self.bugs:
            return prompt - 1
        sizes = [self.chunk_tokens[group] for group in self.eagle]
        return max(0, min([prompt - 1, *(prompt // size * size - size for size in sizes)]))

    def load_window(self, group: int, length: int) -> int | None:
        """Chunks that resuming at a length takes, which may end inside one (`load_window_size_in_chunks`)."""
        window, span, size = self.window(group), self.span(group), self.chunk_tokens[group]
        return window if window is None or span is None else max(window, -(-(span + -length % size) // size))

    @functools.cached_property
    def near_eviction(self) -> int:
        """Blocks that a step looks at to store them lazily, twice what it may take (`_estimate_lazy_target_blocks`)."""
        total = 0
        for spec, size in zip(self.cache.topology.specs, self.cache.block_sizes, strict=True):
            tokens = spec.most_read + size if spec.slides else self.step_tokens
            total += 2 if spec.snapshot else -(-tokens // size)
        return 2 * total

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """Groups that need the chunks before a length only, those that need most first."""
        groups = [group for group in range(len(self.chunk_tokens)) if self.window(group) is not None]
        return tuple(sorted(groups, key=lambda group: -(self.window(group) or 0)))

    @functools.cached_property
    def lookup_order(self) -> tuple[int, ...]:
        """Groups in the order in which they are looked up: full attention, then windows."""
        full = [group for group in range(len(self.chunk_tokens)) if self.window(group) is None]
        return (*full, *self.windows)

    @functools.cached_property
    def aligned(self) -> tuple[int, ...]:
        """Recurrent groups in `align` mode, whose states are handed over at boundaries."""
        return tuple(group for group, spec in enumerate(self.cache.topology.specs) if spec.keeps_states)

    @functools.cached_property
    def tails(self) -> bool:
        """True if the end of a prompt inside a block is kept, too (`supports_partial_tail`)."""
        finer = any(self.cache.block_size(group) > self.cache.hash_block_size for group in self.aligned)
        alike = self.blocks_per_chunk == 1 and len(set(self.cache.block_sizes)) == 1
        return finer and alike and set(self.windows) <= set(self.aligned)

    def proof(self, group: int) -> int:
        """Tokens after a tail of a draft's group whose key says that it is settled (`eagle_proof_margin`)."""
        if group not in self.eagle or group in self.aligned or not self.tails:
            return 0
        return self.cache.hash_block_size if self.cache.partial_hits else self.cache.block_size(group)

    @functools.cached_property
    def alignment(self) -> int | None:
        """Tokens to which loads end, as far as stores know it; None where groups of full attention differ."""
        full = {size for group, size in enumerate(self.chunk_tokens) if self.window(group) is None}
        return max(full or self.chunk_tokens) if len(full) < 2 else None


def chunk_bytes(block_bytes: int, workers: int, blocks_per_chunk: int) -> int:
    """Bytes of a chunk: a block's on each of these workers, rounded up to pages.

    A tier of a size (`--kv-offloading-size`) is that of all workers of an engine together.

    Args:
      block_bytes: of a block of the GPU's pool on one worker.
      workers: workers of one engine whose blocks a chunk holds.
      blocks_per_chunk: blocks of a chunk.
    """
    return -(-block_bytes * workers * blocks_per_chunk // PAGE) * PAGE
