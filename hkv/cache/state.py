"""The state of a cache that is served in whole steps: eleven arrays that vectorised updates change in place.

`hkv.state.state.State` is made for one operation after the other, and cannot serve a step at a cost of its new blocks:

- its free queue has empty places, wherever a hit took a block out of the middle. The next n free blocks are then an
  unknown number of places away; here they are the next n places.
- its key table is indexed by numbers that a host gave to prefix keys. A step makes its keys on the device, where
  nobody can number them; here a block carries its whole key.
- its rows keep stale ids before their first block that is not null, which a reader has to know; here those are 0, and
  so rows are block tables that kernels can read.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.parameters import Parameters, of_config
from hkv.errors import ConfigError
from hkv.pytrees import pytree


class StepCounter(enum.IntEnum):
    """Indices into `StepState.counters`."""

    HEAD = 0
    """Place in the queue's ring of the next block to hand out, before masking."""
    TAIL = 1
    """Place after the last one, before masking; `TAIL - HEAD` blocks are free."""
    REGISTERED = 2
    """Blocks registered so far, modulo 2**32."""
    EVICTIONS = 3
    """Blocks whose keys were dropped because they were handed out."""
    INDEXED = 4
    """`REGISTERED` when the index was brought up to date."""
    PROBES = 5
    """Farthest that the index has a block from the slot of its key."""


class StepRequest(enum.IntEnum):
    """The first columns of `StepState.requests`."""

    LIVE = 0
    """1 if the row has a request."""
    COMPUTED = 1
    """Tokens computed, or being computed by the last step."""
    PROMPT = 2
    """Tokens of its prompt; 0 where that is not known."""
    SHARED_PREFIX = 3
    """Tokens up to which others were seen to share its prefix, if that is more than it adopted; else 0."""


class StepRow(enum.IntEnum):
    """The columns of `StepState.requests` that follow, each once for every group. Units are blocks."""

    LENGTH = 0
    """Entries of the row, null ones included."""
    FIRST = 1
    """Entries before this one were given back, and are null; where there are sinks, those after them."""
    CACHED = 2
    """Entries already looked at for registration."""
    GROWN = 3
    """1 if the row was given blocks, and ends in a running state and states for drafts where it has such; only where
    groups have states for drafts, or hits end inside blocks."""
    PARTIAL = 4
    """Entry of a block that the row may not write before it is copied, plus 1, else 0: a hit ends inside it, or its
    state was registered. Only where hits end inside blocks."""
    EXPORT = 5
    """Tokens after which the row's last chunk left a state behind inside it, else 0; only where groups have states for
    prefill checkpoints."""
    EXPORT_ENTRY = 6
    """Entry of that state's block."""
    PREFILL = 7
    """Tokens that the request came with, less the last, if those are more than its prompt, else 0; in every group."""


def row_fields(count: int) -> tuple[StepRow, ...]:
    """The fields of a group of which there are `count`, in order.

    Args:
      count: 3, 4 with GROWN, 5 with PARTIAL too, 7 or 8 with those of states inside chunks besides.
    """
    fields = tuple(StepRow)
    if count <= StepRow.EXPORT:
        return fields[:count]
    return fields if count == len(fields) else (*fields[: StepRow.PARTIAL], *fields[StepRow.EXPORT :])


PAD = -1
"""A row that is none; the block and offset of a token that is written nowhere."""

KEY_WORDS = 6
"""Words of a block's key: the fingerprint's four, the group, and how many blocks were registered before it."""

ERA, OWN_ERA = 6, 7
"""Two words more where blocks have several entries (`hkv.cache.spans`): the entry's era, and that of block b at
entry b."""

SLOTS = 4
"""Slots of the index for each place of the queue: few keys then have to make way for others."""

HASH_WORDS = 12
"""Words in which a row hashes: the last key, the digest of the hash block being filled, its last four tokens."""

MOST_AHEAD = 64
"""Most tokens after a hash block that its key may cover."""


@pytree()
@dataclasses.dataclass(frozen=True)
class StepState:
    """A cache of R rows, G groups and at most N blocks. Immutable; donate it to the step that replaces it.

    Attributes:
      queue: int32[Q], the free queue: a ring of Q places, a power of two, at least N. From HEAD to TAIL
        (`StepCounter`) it holds the free blocks, the next to be handed out first, without gaps.
      refs: int32[N], twice the references to each block, plus 1 if it is registered. Free blocks and the null block 0
        have no references.
      marks: int32[N], scratch: means nothing between steps.
      keys: uint32[N, 6], what each block is registered under (`KEY_WORDS`); means nothing for blocks that are not. Of
        several blocks with the same key, the one registered first counts. uint32[P * N, 8] where hits end inside blocks
        of full attention, which hold at most P hash blocks (`hkv.cache.spans`).
      rows: int32[R, G, W], block ids; 0 for none.
      requests: int32[R, 4 + 3 * G], what each row knows of its request (`StepRequest`), then LENGTH of each group,
        FIRST of each, CACHED of each (`StepRow`); int32[R, 4 + 4 * G] with GROWN, where groups have states for drafts;
        int32[R, 4 + 5 * G] with PARTIAL, where hits end inside blocks; three fields of each group more, with EXPORT,
        EXPORT_ENTRY and PREFILL, where chunks leave states behind inside them (`row_fields`).
      chains: uint32[R, C, 4], the key of each whole hash block of the row's tokens; its link where its key covers
        tokens that are not computed yet.
      hashing: uint32[R, 12], where hashing of the row's tokens stands (`HASH_WORDS`); uint32[R, 12 + L] with the row's
        last L tokens, where keys cover as many tokens after their hash blocks (`hkv.cache.token_hashing`).
      log: int32[Q], a ring: the block (or entry) registered as the n-th is at n modulo Q.
      index: int32[4 * Q], a hash table from keys to blocks (`hkv.cache.key_index`); 0 in slots that are empty. As many
        times longer as blocks have entries.
      counters: int32[6], the queue's ends and what was counted (`StepCounter`).
    """

    queue: jax.Array
    refs: jax.Array
    marks: jax.Array
    keys: jax.Array
    rows: jax.Array
    requests: jax.Array
    chains: jax.Array
    hashing: jax.Array
    log: jax.Array
    index: jax.Array
    counters: jax.Array


@pytree()
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """Input of one step: the new tokens of Q queries, one query after the other in one array of N places.

    Attributes:
      tokens: int32[N], the new tokens of every query, its drafts last; behind the last query, anything.
      cu_q_lens: int32[Q + 1], where each query begins, ascending; the last entry is where the last one ends.
      rows: int32[Q], the row of each query, all different; -1 for none. They are served in this order.
      drafts: int32[Q], how many of a query's last tokens are drafts: they need slots, and are not registered. A query
        of drafts alone is left out.
      in_flight: int32[Q], of the tokens computed before, those whose steps have not come back: they still read.
    """

    tokens: jax.Array
    cu_q_lens: jax.Array
    rows: jax.Array
    drafts: jax.Array
    in_flight: jax.Array


@pytree()
@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one step of Q queries over N places.

    Attributes:
      status: int32[Q], `hkv.Status`. All but OK took nothing; NO_ROOM and STEP_FULL have nevertheless
        given back what the row cannot read any more, as vLLM 0.33 does.
      allowed: int32[Q], settled tokens, of those asked for, that the row may compute in one step: fewer only where it
        is refused with CROSSES_STATE, as a chunk that begins inside a block of a recurrent group has to end with it.
      blocks: int32[G, N], the block in which each token is written, -1 for none.
      offsets: int32[G, N], its offset in that block, in tokens, -1 for none. Under context parallelism a
        block counts the tokens of all ranks that share it; `hkv.cache.blocks.on_rank` says which are whose.
      reads: int32[Q, G], the block with the state after the tokens computed before, for recurrent and opaque groups; 0
        for none: the row begins with zeros.
      writes: int32[Q, G], the block for the state after the query's new tokens, without drafts; -1 for none.
      registered: int32[Q, G], tokens of the row up to the end of the last block, or state, that the step registered in
        each group; 0 for none. Others resume where every group has one: a prompt of which a recurrent group registers
        nothing in all its steps, as one chunk that ends inside a state's block, leaves nothing to hit, though it is OK.
      deferred: int32[2], blocks that could not be given back, and blocks that could not be looked at for registration,
        because the step's room was too small; later steps will.
      copies: int32[Q, G, 2], block and its copy, to be copied in all layers of the group before anything of this step
        is read or written, all sources before any target; -1 twice for none. None where hits end with blocks.
      checkpoints: int32[Q, G, 2], how many of the query's tokens a state stands after that the chunk leaves behind
        inside it, and the block to write it to, in all layers of the group; -1 twice for none. None where no group
        has states for prefill checkpoints.
    """

    status: jax.Array
    allowed: jax.Array
    blocks: jax.Array
    offsets: jax.Array
    reads: jax.Array
    writes: jax.Array
    registered: jax.Array
    deferred: jax.Array
    copies: jax.Array | None = None
    checkpoints: jax.Array | None = None


def init(
    config: VllmConfig, *, rows: int, row: int, blocks: int | None = None, chain: int | None = None
) -> tuple[Parameters, StepState]:
    """An empty cache, as NumPy arrays: every block but the null block is free, in order of its id.

    Args:
      config: the configuration, which becomes data.
      rows: requests at the same time, R.
      row: most blocks a request may have in one group, W.
      blocks: bucket for the pool; the pool itself by default.
      chain: most hash blocks of a request, C; as many as fill a row by default.

    Raises:
      ConfigError: the configuration has what whole steps cannot express, or does not fit.
    """
    require_expressible(config)
    groups = len(config.topology.specs)
    parameters = of_config(config, groups + 1)
    blocks = config.num_blocks if blocks is None else blocks
    for name, value, least in (("rows", rows, 1), ("row", row, 1), ("blocks", blocks, config.num_blocks)):
        if type(value) is not int or not least <= value < 1 << 27:
            raise ConfigError(name, value, f"an integer of at least {least} and below 2**27")
    finest = -(-row * max(config.block_sizes, default=1) // config.hash_block_size) if chain is None else chain
    if type(finest) is not int or finest < 1:
        raise ConfigError("chain", chain, "a positive integer")
    queue = np.zeros(1 << (blocks - 1).bit_length(), np.int32)
    # Ascending ids, as vLLM's `BlockPool` begins.
    queue[: config.num_blocks - 1] = np.arange(1, config.num_blocks)
    fields = int(StepRow.PARTIAL if draft_states(config) or checkpoint_groups(config) else StepRow.GROWN)
    fields = int(StepRow.EXPORT) if config.partial_hits else fields
    # Fields that only some configurations need are left out of the others' lines, which every step reads and writes.
    fields += (len(StepRow) - StepRow.EXPORT) * (checkpoint_groups(config) > 0)
    parts = entry_parts(config)
    counters = np.zeros(len(StepCounter), np.int32)
    counters[StepCounter.TAIL] = config.num_blocks - 1
    return parameters, StepState(
        queue=queue,  # type: ignore[arg-type]
        refs=np.zeros(blocks, np.int32),  # type: ignore[arg-type]
        marks=np.zeros(blocks, np.int32),  # type: ignore[arg-type]
        keys=np.zeros((parts * blocks, KEY_WORDS if parts == 1 else OWN_ERA + 1), np.uint32),  # type: ignore[arg-type]
        rows=np.zeros((rows, groups, row), np.int32),  # type: ignore[arg-type]
        requests=np.zeros((rows, len(StepRequest) + fields * groups), np.int32),  # type: ignore[arg-type]
        chains=np.zeros((rows, finest, 4), np.uint32),  # type: ignore[arg-type]
        hashing=np.zeros((rows, HASH_WORDS + config.hash_lookahead), np.uint32),  # type: ignore[arg-type]
        log=np.zeros(len(queue), np.int32),  # type: ignore[arg-type]
        index=np.zeros(SLOTS * len(queue) << (parts - 1).bit_length(), np.int32),  # type: ignore[arg-type]
        counters=counters,  # type: ignore[arg-type]
    )


def require_expressible(config: VllmConfig) -> None:
    """Raises for configurations whose rules a whole step does not have.

    Raises:
      ConfigError: hashes that look far ahead, or at all with hits inside blocks; recurrent states that EAGLE registers
        inside blocks, though hits end with them; an encoder's output, or windows that are computed again.
    """
    if config.hash_lookahead > MOST_AHEAD:
        raise ConfigError("hash_lookahead", config.hash_lookahead, f"at most {MOST_AHEAD} tokens")
    if config.hash_lookahead and config.partial_hits:
        expected = "0 where hits end inside blocks: a state moves on before its key is known"
        raise ConfigError("hash_lookahead", config.hash_lookahead, expected)
    if states_inside_blocks(config):
        expected = "the block of every recurrent group, or partial_hits: EAGLE registers states inside larger ones"
        raise ConfigError("hash_block_size", config.hash_block_size, expected)
    for group, spec in enumerate(config.topology.specs):
        if spec.encoder_tokens:
            raise ConfigError(f"groups[{group}].kind", spec.kind, "a kind of a request's own tokens")
        if kinds.layer(spec).replays:
            raise ConfigError(f"groups[{group}].kind", spec.kind, "a kind that needs no tokens computed again")


def states_inside_blocks(config: VllmConfig) -> bool:
    """True if recurrent states are registered inside blocks, and copied on write, though hits end with blocks.

    Of several groups, those under the EAGLE drop register what goes on behind the last scheduler block (vLLM 0.33
    `get_num_cacheable_tokens`), and of a recurrent one the state after the prompt's last hash block.
    """
    if config.partial_hits or not config.caching or len(config.topology.specs) == 1:
        return False
    groups = config.topology.specs
    larger = (groups[group] for group in config.eagle_group_ids if config.block_size(group) > config.hash_block_size)
    return any(spec.prefix_cacheable and spec.snapshot and kinds.layer(spec).registers_parts for spec in larger)


def room_for(config: VllmConfig, *, queries: int, tokens: int) -> int:
    """Room that a step of so many queries and tokens, drafts included, never exceeds.

    Steps after a larger one may have more to give back than that: what does not fit waits.
    """
    return room_of(config.block_sizes, registration_unit(config), extra_blocks(config), queries, tokens)


def registration_unit(config: VllmConfig) -> int:
    """Tokens of which what is registered is a multiple, where there are several groups; else 1.

    A block more under EAGLE, where the prompt's tail is registered in a block that is not full yet.
    """
    if len(config.block_sizes) == 1:
        return 1
    return config.scheduler_block_size + (max(config.block_sizes) if config.uses_eagle else 0)


def draft_states(config: VllmConfig) -> int:
    """States for drafts of a request in all groups together."""
    return sum(getattr(spec, "num_speculative_blocks", 0) for spec in config.topology.specs)


def checkpoint_groups(config: VllmConfig) -> int:
    """Recurrent groups of which a chunk may leave a state behind inside it."""
    return sum(
        spec.keeps_states
        and getattr(spec, "num_prefill_checkpoint_blocks", 0) > 0
        and getattr(spec, "prefill_checkpoint_alignment", None) is not None
        for spec in config.topology.specs
    )


def extra_blocks(config: VllmConfig) -> int:
    """Blocks that a query may need besides those of its tokens: states for drafts and inside chunks, and copies.

    Where hits end inside blocks, it may also register a block a group under a key that ends inside it.
    """
    copies = len(config.block_sizes) if config.partial_hits else 0
    return draft_states(config) + checkpoint_groups(config) + copies


def entry_parts(config: VllmConfig) -> int:
    """Keys that a block may have at once: as many as a block of full attention holds hash blocks, if hits end inside.

    A state has one: it stands at one length.
    """
    if not config.partial_hits:
        return 1
    pairs = zip(config.block_sizes, config.topology.specs, strict=True)
    whole = [size for size, spec in pairs if spec.prefix_cacheable and spec.reads_all]
    return max((size // config.hash_block_size for size in whole), default=1)


def room_of(block_sizes: Sequence[int], unit: int, extra: int, queries: int, tokens: int) -> int:
    """`room_for` of groups with these blocks, `extra` blocks (`extra_blocks`), and registration by `unit` tokens.

    A query begins anywhere in a block, and may have up to `unit - 1` earlier tokens to register.
    """
    return sum((tokens + queries * (max(unit, size) - 1)) // size for size in block_sizes) + queries * extra


def counted(counters: jax.Array, more: Mapping[StepCounter, jax.Array]) -> jax.Array:
    """The counters int32[6] with int32[] more of some. No writes of single ones: XLA compiles each by itself."""
    line = jnp.arange(counters.shape[0], dtype=jnp.int32)
    for counter, count in more.items():
        counters = counters + jnp.where(line == int(counter), count, 0)
    return counters


def replace(state: StepState, **changes: jax.Array) -> StepState:
    """The state with some of its arrays replaced."""
    return StepState(**{**vars(state), **changes})
