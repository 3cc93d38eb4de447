"""The cache for `jit`: `init`, `arrive`, `step`, `finish` for batches, `longest_hit`, `allocate`, `free` for one row.

One value, a `Cache`, holds everything; each function gives a new one and is jitted, the old one donated: do not use it
again. All may be called inside a `jit`, `scan` or `while_loop` of the caller's. The rules are vLLM 0.33's, as
`hkv.cache.step` and `hkv.cache.arrivals` state them (`docs/step.md`).

Provisional: whole steps will become ragged.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.array_arguments import require_array
from hkv.cache import arrivals, state
from hkv.cache import step as whole
from hkv.cache.arrivals import ArrivalResult, Arrivals
from hkv.cache.state import PAD, StepBatch, StepCounter, StepRequest, StepResult, StepRow, StepState
from hkv.dialects.vllm.config import VllmConfig, default_block_sizes
from hkv.dialects.vllm.rules.parameters import Parameters
from hkv.keys.fingerprint import ROOT
from hkv.model.topology import Topology
from hkv.state.status import Status
from hkv.typed_jit import typed_jit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache of R rows (requests), G groups and rows of at most W blocks a group. Immutable; a pytree.

    Attributes:
      parameters: the configuration, as data.
      state: blocks, rows and keys.
      room: static; most blocks that a step gives back, hands out and registers, each.
      drafts: static; slots that a step answers beyond its tokens.
    """

    parameters: Parameters
    state: StepState
    room: int = dataclasses.field(metadata={"static": True})
    drafts: int = dataclasses.field(metadata={"static": True})

    @property
    def tables(self) -> jax.Array:
        """Block ids of each row and group in order, int32[R, G, W]; 0, the null block, where there is none."""
        return self.state.rows

    @property
    def running(self) -> jax.Array:
        """Rows that have a request, bool[R]."""
        return self.state.requests[:, StepRequest.LIVE] != 0

    @property
    def computed(self) -> jax.Array:
        """Tokens of each row that are in the cache, int32[R]."""
        return self.state.requests[:, StepRequest.COMPUTED]

    @property
    def lengths(self) -> jax.Array:
        """Blocks of each row and group, null ones included, int32[R, G]."""
        groups = self.tables.shape[1]
        first = len(StepRequest) + int(StepRow.LENGTH) * groups
        return self.state.requests[:, first : first + groups]

    @property
    def allowed(self) -> jax.Array:
        """Most tokens that each row may compute in its next step, int32[R]; 2**30 - 1 where nothing limits them.

        A row inside a block of a recurrent group may compute up to its end: `step` refuses more with CROSSES_STATE.
        """
        groups = self.parameters.groups[: self.tables.shape[1]]
        return whole.before_states(groups, self.computed)

    @property
    def free_blocks(self) -> jax.Array:
        """Blocks that can be handed out, int32[]; those that still hold reusable prefixes among them."""
        return self.state.counters[StepCounter.TAIL] - self.state.counters[StepCounter.HEAD]

    @property
    def evictions(self) -> jax.Array:
        """Cached blocks that were handed out to another use so far, int32[]."""
        return self.state.counters[StepCounter.EVICTIONS]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LongestHit:
    """The longest cached prefix of a prompt. Lengths are tokens.

    Attributes:
      length: int32[], the longest length at which every group can resume.
      alone: int32[G], the longest one of each group by itself.
    """

    length: jax.Array
    alone: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAllocation:
    """Status, hit and slots of one row.

    Attributes:
      status: int32[], `hkv.state.status.Status`; all but OK took nothing.
      hit: int32[], tokens found in the cache, of a request that begins; else 0.
      allowed: int32[], tokens after the hit that may be computed at once; fewer than asked only with CROSSES_STATE.
      blocks: int32[G, T + drafts], the block in which each token after the hit is written, -1 for none.
      offsets: int32[G, T + drafts], its offset in that block, in tokens, -1 for none.
    """

    status: jax.Array
    hit: jax.Array
    allowed: jax.Array
    blocks: jax.Array
    offsets: jax.Array


def cache_config(
    topology: Topology,
    num_blocks: int,
    *,
    caching: bool = True,
    max_model_len: int = 1 << 20,
    max_in_flight_tokens: int | None = None,
    watermark: float = 0.0,
) -> VllmConfig:
    """The configuration of a cache of these groups, its block sizes as vLLM 0.33 resolves them.

    Args:
      topology: the groups; their blocks come from one pool.
      num_blocks: blocks in the pool, the null block 0 included.
      caching: whether prefixes are reused.
      max_model_len: tokens of the longest request.
      max_in_flight_tokens: tokens that may be computed but not yet processed; None for `max_model_len`.
      watermark: share of the pool that admission leaves free while something is running.

    Raises:
      ConfigError: the rules forbid such a cache.
    """
    scheduler_block, hash_block = default_block_sizes(topology)
    return VllmConfig(
        topology=topology,
        num_blocks=num_blocks,
        hash_block_size=hash_block,
        scheduler_block_size=scheduler_block,
        caching=caching,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        watermark=watermark,
    )


def init(
    config: VllmConfig, *, rows: int, row_blocks: int, step_tokens: int = 1, drafts: int = 0, room: int | None = None
) -> Cache:
    """An empty cache.

    Args:
      config: the configuration, from `cache_config` or a plan.
      rows: requests at the same time, R.
      row_blocks: most blocks of a request in one group, W.
      step_tokens: most new tokens of every row in one step.
      drafts: most draft tokens after them that need slots.
      room: most blocks that a step gives back, hands out and registers, each; None for as many as such steps can need.

    Raises:
      ConfigError: the configuration has what whole steps cannot express, or does not fit.
    """
    parameters, empty = state.init(config, rows=rows, row=row_blocks)
    room = state.room_for(config, rows=rows, tokens=step_tokens, lookahead=drafts) if room is None else room
    return jax.tree.map(jnp.asarray, Cache(parameters, empty, room, drafts))


@typed_jit(donate_argnames="cache")
def arrive(
    cache: Cache, rows: jax.Array, tokens: jax.Array, counts: jax.Array, roots: jax.Array | None = None
) -> tuple[Cache, ArrivalResult]:
    """Requests begin in empty rows with the longest prefix that the cache has; `step` computes the rest.

    Args:
      cache: donated.
      rows: int[K], the rows they take, all different; -1 for none.
      tokens: int[K, P], their prompts, padded.
      counts: int[K], tokens of each prompt.
      roots: uint32[K, 4], the same words for requests that may share blocks; None where all may.

    Returns:
      The cache, and the hits.

    Raises:
      OperationError: an array of another shape or dtype.
    """
    rows = require_array("rows", rows, (None,))
    size = rows.shape[0]
    tokens = require_array("tokens", tokens, (size, None))
    counts = require_array("counts", counts, (size,))
    roots = _roots(size) if roots is None else require_array("roots", roots, (size, 4), np.uint32)
    after, found = arrivals.arrive(cache.parameters, cache.state, Arrivals(rows, roots, tokens, counts))
    return _with(cache, after), found


@typed_jit(donate_argnames="cache")
def step(
    cache: Cache,
    tokens: jax.Array,
    counts: jax.Array,
    lookahead: jax.Array | None = None,
    in_flight: jax.Array | None = None,
) -> tuple[Cache, StepResult]:
    """One serving step: every row gives back what it cannot read any more, and gets slots for its new tokens.

    Args:
      cache: donated.
      tokens: int[R, T], the new tokens of each row, padded.
      counts: int[R], how many; 0 leaves the row out.
      lookahead: int[R], draft tokens after them that need slots, at most the cache's `drafts`; None for none.
      in_flight: int[R], of the tokens computed before, those whose steps have not come back; None for none.

    Returns:
      The cache; the slots and a status for each row.

    Raises:
      OperationError: an array of another shape or dtype.
    """
    rows = cache.tables.shape[0]
    none = jnp.zeros(rows, jnp.int32)
    batch = StepBatch(
        require_array("tokens", tokens, (rows, None)),
        require_array("counts", counts, (rows,)),
        none if lookahead is None else require_array("lookahead", lookahead, (rows,)),
        none if in_flight is None else require_array("in_flight", in_flight, (rows,)),
    )
    after, result = whole.step(cache.parameters, cache.state, batch, room=cache.room, drafts=cache.drafts)
    return _with(cache, after), result


@typed_jit(donate_argnames="cache")
def finish(cache: Cache, rows: jax.Array) -> tuple[Cache, jax.Array]:
    """Requests end and give back all they hold; their prefixes stay in the cache until their blocks are reused.

    Args:
      cache: donated.
      rows: int[K], different rows; -1 for none.

    Returns:
      The cache, and a status int32[K].

    Raises:
      OperationError: an array of another shape or dtype.
    """
    after, status = whole.finish(cache.state, require_array("rows", rows, (None,)))
    return _with(cache, after), status


@typed_jit()
def longest_hit(cache: Cache, tokens: jax.Array, count: jax.Array | int | None = None) -> LongestHit:
    """The longest prefix of a prompt that the cache has; nothing changes.

    Args:
      cache: the cache, not donated.
      tokens: int[P], the prompt.
      count: int[], tokens of it; None for all. Nothing is found for a count outside the prompt.

    Raises:
      OperationError: an array of another shape or dtype.
    """
    tokens = require_array("tokens", tokens, (None,))
    count = _count(tokens, count)
    counts = jnp.where((count >= 0) & (count <= tokens.shape[0]), count, 0)[None]
    _, found = arrivals.look_up(cache.parameters, cache.state, _roots(1), tokens[None], counts)
    return LongestHit(found.hits[0], found.alone[0])


@typed_jit(donate_argnames="cache")
def allocate(
    cache: Cache,
    row: jax.Array | int,
    tokens: jax.Array,
    count: jax.Array | int | None = None,
    lookahead: jax.Array | int = 0,
) -> tuple[Cache, RowAllocation]:
    """Blocks for the next tokens of one row: of an empty row, for a whole prompt, after its longest hit.

    It is `arrive`, where the row is empty, and a `step` of this row alone. A request that begins and is refused leaves
    everything as it was; one that runs has given back what it cannot read any more, as vLLM 0.33 does. Takes time of
    the pool's size.

    Args:
      cache: donated.
      row: int[], the row.
      tokens: int[T], its next tokens, settled ones.
      count: int[], how many of them; None for all.
      lookahead: int[], draft tokens after them that need slots, at most the cache's `drafts`.

    Returns:
      The cache, and the slots.

    Raises:
      OperationError: an array of another shape or dtype.
    """
    row = require_array("row", row, ())
    tokens = require_array("tokens", tokens, (None,))
    count = _count(tokens, count)
    lookahead = require_array("lookahead", lookahead, ())
    parameters, before = cache.parameters, cache.state
    rows, groups, width = before.rows.shape
    at, known = state.known_rows(before, row)
    runs = known & (before.requests[at, StepRequest.LIVE] != 0)
    prompt = Arrivals(row[None], _roots(1), tokens[None], count[None])

    def go_on(now: StepState) -> tuple[StepState, jax.Array, jax.Array]:
        return now, jnp.int32(Status.OK), jnp.int32(0)

    def begin(now: StepState) -> tuple[StepState, jax.Array, jax.Array]:
        after, found = arrivals.arrive(parameters, now, prompt)
        status = jnp.where(known, found.status[0], int(Status.NO_SUCH_SLOT))
        return after, status, found.hits[0]

    after, status, hit = lax.cond(runs, go_on, begin, before)
    place = jnp.where(status == int(Status.OK), row, rows)
    asked = jnp.zeros(rows, jnp.int32).at[place]
    batch = StepBatch(
        jnp.zeros((rows, tokens.shape[0]), jnp.int32).at[place].set(jnp.roll(tokens, -hit), mode="drop"),
        asked.set(count - hit, mode="drop"),
        asked.set(lookahead, mode="drop"),
        jnp.zeros(rows, jnp.int32),
    )
    # One row cannot give back, be given or register more blocks than its tables have entries.
    after, result = whole.step(parameters, after, batch, room=groups * width, drafts=cache.drafts)
    status = jnp.where(status == int(Status.OK), result.status[at], status)
    refused = ~runs & (status != int(Status.OK))
    after = jax.tree.map(lambda new, old: jnp.where(refused, old, new), after, before)
    shown = (status == int(Status.OK)) & known
    blocks, offsets = (jnp.where(shown, slots[at], PAD) for slots in (result.blocks, result.offsets))
    return _with(cache, after), RowAllocation(
        status, jnp.where(refused, 0, hit), jnp.where(known, result.allowed[at], 0), blocks, offsets
    )


@typed_jit(donate_argnames="cache")
def free(cache: Cache, row: jax.Array | int) -> tuple[Cache, jax.Array]:
    """One request ends and gives back all it holds: `finish` of one row.

    Args:
      cache: donated.
      row: int[], the row.

    Returns:
      The cache, and a status int32[].

    Raises:
      OperationError: no integer.
    """
    after, status = whole.finish(cache.state, require_array("row", row, ())[None])
    return _with(cache, after), status[0]


def _with(cache: Cache, after: StepState) -> Cache:
    """The cache with another state, of the same shapes and dtypes: a loop can carry it."""
    chex.assert_trees_all_equal_shapes_and_dtypes(cache.state, after)
    return dataclasses.replace(cache, state=after)


def _roots(size: int) -> jax.Array:
    return jnp.tile(jnp.array(ROOT, jnp.uint32), (size, 1))


def _count(tokens: jax.Array, count: jax.Array | int | None) -> jax.Array:
    return jnp.int32(tokens.shape[0]) if count is None else require_array("count", count, ())
