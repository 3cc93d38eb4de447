"""Configuration of a cache under vLLM 0.33's rules, validated as that engine validates it. Host-only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hkv.errors import ConfigError, OperationError
from hkv.keys.chained import GIVEN, SEED
from hkv.limits import MAX_BLOCKS, MAX_RANKS, MAX_TOKENS, check_whole
from hkv.model.topology import Topology
from hkv.spec import LayerSpec, retained_sparsely

UNLIMITED = (1 << 30) - 1
"""More tokens, or blocks, than there are: a bound that never binds."""

NAME = "vllm-0.33"
EARLIER = "vllm-0.32"
NAMES = (NAME, EARLIER)
"""Releases whose rules are described. Of 0.32 what differs stands in `VllmConfig`; it is read where a rule asks."""

HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", GIVEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """A hybrid cache as vLLM 0.33's `KVCacheManager` is configured. Lengths are in tokens unless they say blocks.

    Attributes:
      topology: the groups, in order; every group shares one pool.
      num_blocks: blocks in the pool, the null block 0 included.
      dialect: release of vLLM whose rules hold; one of `NAMES`.
      hash: name of the chain hash; `given` where requests bring their keys.
      hash_seed: string whose hash is the root key (vLLM 0.33 `NONE_HASH`).
      hash_block_size: tokens between two chain hashes of a request.
      scheduler_block_size: common multiple of the groups' blocks, to which hits are aligned.
      hash_lookahead: tokens after a hash block that its hash covers as well.
      caching: whether prefix caching is on.
      eagle: whether the EAGLE drop rule is on; with no group flagged, it is on for every group.
      prefill_lookahead: tokens that a multi-module draft looks ahead in prefill.
      retention_interval: distance between retained replay boundaries, 0 for none, None for dense.
      partial_hits: whether sub-block hits are on.
      max_model_len: longest request.
      max_in_flight_tokens: tokens that may be computed but not yet processed; None for `max_model_len`.
      context_parallel: ranks over which the groups with `cp_sharded` split their tokens.
      watermark: share of the pool that admission leaves free while something is running.
      shared_prefix_checkpoint: whether recurrent states are kept where other requests branched off, off the block grid.
      bugs: names of upstream defects to reproduce (`hkv.dialects.vllm.bugs`); empty for the contract.
      zeroing: whether blocks newly handed out are listed, for a worker to zero.
      offloads: whether recurrent states are listed as they are registered, for a connector to store.
    """

    topology: Topology
    num_blocks: int
    dialect: str = NAME
    hash: str = "sha256_cbor"
    hash_seed: str = SEED
    hash_block_size: int
    scheduler_block_size: int
    hash_lookahead: int = 0
    caching: bool = True
    eagle: bool = False
    prefill_lookahead: int = 0
    retention_interval: int | None = None
    partial_hits: bool = False
    max_model_len: int = 1 << 20
    max_in_flight_tokens: int | None = None
    context_parallel: int = 1
    watermark: float = 0.0
    shared_prefix_checkpoint: bool = False
    bugs: frozenset[str] = frozenset()
    zeroing: bool = False
    offloads: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.topology.pools != "shared":
            raise ConfigError("topology.pools", self.topology.pools, "shared: all groups have one pool")
        for index, spec in enumerate(self.topology.specs):
            self._check_group(index, spec)
        if len(self.topology.groups) == 1 and self.caching and self.hash_block_size != self.block_size(0):
            expected = f"the only group's block of {self.block_size(0)} tokens"
            raise ConfigError("hash_block_size", self.hash_block_size, expected)
        self._check_retention()
        if self.caching and self.uses_eagle and self.scheduler_block_size < self.prefill_lookahead:
            expected = f"at most scheduler_block_size {self.scheduler_block_size}"
            raise ConfigError("prefill_lookahead", self.prefill_lookahead, expected)

    def _check_numbers(self) -> None:
        if self.dialect not in NAMES:
            raise ConfigError("dialect", self.dialect, f"one of {', '.join(NAMES)}")
        if self.dialect == EARLIER and self.hash_lookahead:
            raise ConfigError("hash_lookahead", self.hash_lookahead, f"0 under {EARLIER}, whose hashes cover no more")
        if self.hash not in HASHES:
            raise ConfigError("hash", self.hash, f"one of {', '.join(HASHES)}")
        check_whole("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        check_whole("context_parallel", self.context_parallel, 1, MAX_RANKS)
        for name in ("hash_block_size", "scheduler_block_size", "max_model_len"):
            check_whole(name, getattr(self, name), 1, MAX_TOKENS)
        for name in ("hash_lookahead", "prefill_lookahead"):
            check_whole(name, getattr(self, name), 0, MAX_TOKENS)
        if self.max_in_flight_tokens is not None:
            check_whole("max_in_flight_tokens", self.max_in_flight_tokens, 1, MAX_TOKENS)
        if not 0 <= self.watermark <= 1:
            raise ConfigError("watermark", self.watermark, "a share of the pool between 0 and 1")
        if self.scheduler_block_size % self.hash_block_size:
            expected = f"a multiple of hash_block_size {self.hash_block_size}"
            raise ConfigError("scheduler_block_size", self.scheduler_block_size, expected)

    def _check_group(self, index: int, spec: LayerSpec) -> None:
        name = f"groups[{index}].block_size"
        if self.scheduler_block_size % spec.block_size:
            raise ConfigError(name, spec.block_size, f"a divisor of scheduler_block_size {self.scheduler_block_size}")
        cached = self.caching and spec.prefix_cacheable
        if cached and len(self.topology.groups) > 1 and self.block_size(index) % self.hash_block_size:
            raise ConfigError(name, spec.block_size, f"a multiple of hash_block_size {self.hash_block_size}")
        if self.caching and spec.encoder_tokens:
            raise ConfigError("caching", True, f"False beside groups[{index}]: vLLM caches no prefix with an encoder")
        if self.caching and spec.snapshot and not spec.keeps_states:
            raise ConfigError(f"groups[{index}].cache_mode", "none", "align, unless caching is off")
        sharded = spec.shared_by_ranks and self.context_parallel > 1
        if sharded and not spec.reads_all:
            raise ConfigError(f"groups[{index}].cp_sharded", True, f"False for {spec.kind} under context parallelism")

    def _check_retention(self) -> None:
        interval = self.retention_interval
        if interval is None:
            return
        if type(interval) is not int or not 0 <= interval <= MAX_TOKENS or interval % self.scheduler_block_size:
            expected = (
                f"None, 0 or a multiple of scheduler_block_size {self.scheduler_block_size}, at most {MAX_TOKENS}"
            )
            raise ConfigError("retention_interval", interval, expected)
        sparse = any(retained_sparsely(spec) for spec in self.topology.specs)
        if interval and not sparse:
            raise ConfigError("retention_interval", interval, "0 or None without sliding-window or Mamba groups")

    def zeroes(self, group: int) -> bool:
        """True if a group's new blocks are listed: those of attention that grow with a request, not states or rings."""
        spec = self.topology.specs[group]
        return self.zeroing and not spec.snapshot and not spec.one_block

    def offers(self, group: int) -> bool:
        """True if a group's states are listed: those of a recurrent one, by position, with caching."""
        return self.offloads and self.caching and self.topology.specs[group].keeps_states

    @property
    def completed_group(self) -> int | None:
        """Group of full attention whose hit a connector gets, to complete the others'; None where their common hit
        counts: without recurrent states, full attention, several groups or caching."""
        full = [group for group, spec in enumerate(self.topology.specs) if spec.reads_all and spec.prefix_cacheable]
        recurrent = any(spec.snapshot for spec in self.topology.specs)
        return full[0] if full and recurrent and self.caching and len(self.topology.specs) > 1 else None

    @property
    def retains_below_shared_boundaries(self) -> bool:
        """True if a group under the EAGLE drop retains the block before a shared boundary as well.

        A prompt that branches off there resumes from it (vLLM 0.33 `SingleTypeKVCacheManager.cache_blocks`).
        """
        return self.dialect != EARLIER

    @property
    def registers_tails_again(self) -> bool:
        """True if a state that has its key is registered again by each chunk that ends there.

        Hits on it then wait for the next step (vLLM 0.32 `MambaManager._cache_partial_tail_block`).
        """
        return self.dialect == EARLIER

    @property
    def uses_eagle(self) -> bool:
        """True if any group drops a block after a hit."""
        return bool(self.eagle_group_ids)

    @property
    def eagle_group_ids(self) -> tuple[int, ...]:
        """Groups under the EAGLE drop rule: the flagged ones, or all when none is flagged (vLLM 0.33)."""
        if not self.eagle:
            return ()
        return self.topology.eagle_groups or tuple(range(len(self.topology.groups)))

    @property
    def encoder_tokens(self) -> int:
        """Tokens of an encoder's output that one request comes with at most; 0 where no group reads them."""
        return max((spec.encoder_tokens for spec in self.topology.specs), default=0)

    def block_size(self, group: int) -> int:
        """Tokens in one manager block of a group: its spec's, times the ranks that share it (vLLM 0.33)."""
        return manager_block(self.topology.groups[group].spec, self.context_parallel)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in one manager block of each group."""
        return tuple(self.block_size(group) for group in range(len(self.topology.groups)))

    @property
    def hit_alignment(self) -> int:
        """Tokens to which the hits of several groups are aligned: hash blocks with sub-block hits."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @property
    def in_flight_limit(self) -> int:
        """Most tokens that may be in flight: `max_in_flight_tokens`, or `max_model_len` when that is None."""
        return self.max_model_len if self.max_in_flight_tokens is None else self.max_in_flight_tokens

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free while something is running."""
        return int(self.watermark * self.num_blocks)


def check_truncation(config: VllmConfig, rows: Sequence[Sequence[int]], tokens: int) -> None:
    """Checks that the rows of a hit, one for each group, can be cut after so many tokens.

    Raises:
      OperationError: `tokens` is inside a block, or beyond what a group has that is not recurrent.
    """
    if len(rows) != len(config.topology.specs):
        raise OperationError("rows", f"{len(rows)} rows", f"one for each of {len(config.topology.specs)} groups")
    if type(tokens) is not int or tokens < 0:
        raise OperationError("tokens", tokens, "an integer of at least 0")
    for group, (spec, row) in enumerate(zip(config.topology.specs, rows, strict=True)):
        size = config.block_size(group)
        if not spec.prefix_cacheable:
            if row:
                raise OperationError("rows", row, f"no block of group {group}, which is not cached")
        elif tokens % size:
            raise OperationError("tokens", tokens, f"a multiple of group {group}'s block of {size}")
        elif tokens // size > len(row) and not spec.snapshot:
            raise OperationError("tokens", tokens, f"at most the {len(row) * size} of group {group}'s row")


def check_encoder(tokens: int, most: int) -> None:
    """Raises OperationError where a request comes with more than `most` tokens of an encoder's output."""
    if tokens > most:
        raise OperationError("encoder", tokens, f"at most encoder_len {most}" if most else "0: no group reads them")


def default_block_sizes(topology: Topology, context_parallel: int = 1) -> tuple[int, int]:
    """`(scheduler_block_size, hash_block_size)` of vLLM 0.33's `resolve_kv_cache_block_sizes`, no `prefix_match_unit`.

    Args:
      topology: the groups; Mamba groups count as being in `align` mode.
      context_parallel: ranks over which `cp_sharded` groups split their tokens.
    """
    sizes = [manager_block(spec, context_parallel) for spec in topology.specs]
    cacheable = [size for size, spec in zip(sizes, topology.specs, strict=True) if spec.prefix_cacheable]
    return math.lcm(*sizes), math.gcd(*(cacheable or sizes))


def default_partial_hits(
    specs: Sequence[LayerSpec], hash_block_size: int, context_parallel: int = 1, caching: bool = True
) -> bool:
    """True if sub-block hits are on (vLLM 0.33 `partial_hash_hits_enabled`, given the managers).

    They are on if recurrent states may end inside blocks and every cacheable group can look up partly
    filled blocks; the full family and Mamba can, others need blocks of `hash_block_size`.
    """
    if not caching or len(specs) < 2:
        return False
    least = hash_block_size + (context_parallel == 1)
    if not any(spec.snapshot and spec.block_size >= least for spec in specs):
        return False
    return all(
        spec.reads_all or spec.snapshot or manager_block(spec, context_parallel) == hash_block_size
        for spec in specs
        if spec.prefix_cacheable
    )


def manager_block(spec: LayerSpec, context_parallel: int) -> int:
    """Tokens in one manager block: the spec's, times the ranks that share it."""
    return spec.block_size * (context_parallel if spec.shared_by_ranks else 1)


def keeps_shared_boundaries(config: VllmConfig) -> bool:
    """True if recurrent states are kept where others were seen to branch off (vLLM 0.33 `KVCacheManager`)."""
    asked = config.shared_prefix_checkpoint and config.partial_hits and config.prefill_lookahead <= 1
    return asked and (config.uses_eagle or bool(config.topology.eagle_groups))


def finder_groups(config: VllmConfig) -> list[list[int]]:
    """Groups that are looked up together, since their specs are equal, those that need every block first.

    vLLM 0.33 `HybridKVCacheCoordinator.verify_and_split_kv_cache_groups`; its sort is stable.
    """
    if not config.caching:
        return []
    found: dict[tuple[Any, ...], list[int]] = {}
    for group, spec in enumerate(config.topology.specs):
        if spec.prefix_cacheable:
            found.setdefault((type(spec), spec), []).append(group)
    return sorted(found.values(), key=lambda members: not config.topology.specs[members[0]].reads_all)


def eagle_groups(config: VllmConfig, finders: list[list[int]]) -> set[int]:
    """Groups whose hits drop a block: the EAGLE groups, and every group looked up together with one (vLLM 0.33)."""
    flagged = set(config.eagle_group_ids)
    return {group for members in finders if flagged & set(members) for group in members}
