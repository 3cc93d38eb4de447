"""The cache for `jit`: `init`, `arrive`, `step`, `finish` for batches, `longest_hit`, `allocate`, `free` for one row.

One value, a `Cache`, holds everything; each function gives a new one and is jitted, the old one donated: do not use it
again. All may be called inside a `jit`, `scan` or `while_loop` of the caller's. The rules are vLLM 0.33's, as
`hkv.cache.step` and `hkv.cache.arrivals` state them (`docs/cache.md`).
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

from hkv.cache import arrivals, state
from hkv.cache import step as whole
from hkv.cache.arrivals import ArrivalResult, Arrivals
from hkv.cache.queries import before_states
from hkv.cache.spans import count_up, unified
from hkv.cache.state import StepBatch, StepCounter, StepRequest, StepResult, StepRow, StepState
from hkv.dialects.vllm.config import VllmConfig, default_block_sizes, default_partial_hits
from hkv.dialects.vllm.rules.parameters import Parameters
from hkv.errors import ConfigError, OperationError
from hkv.keys.fingerprint import ROOT
from hkv.model.topology import Topology
from hkv.pytrees import pytree
from hkv.state.status import Status
from hkv.typed_jit import Ids, require_array, typed_jit


@pytree()
@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache of R rows (requests), G groups and rows of at most W blocks a group. Immutable; a pytree.

    Attributes:
      parameters: the configuration, as data.
      state: blocks, rows and keys.
      block_sizes: static; tokens in a block of each group.
      unit: static; tokens of which what steps register is a multiple.
      extra: static; blocks that a query may need besides those of its tokens (`hkv.cache.state.extra_blocks`).
    """

    parameters: Parameters
    state: StepState
    block_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    unit: int = dataclasses.field(metadata={"static": True})
    extra: int = dataclasses.field(metadata={"static": True})

    @property
    def tables(self) -> jax.Array:
        """Block ids of each row and group in order, int32[R, G, W]; 0 is the null block."""
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
        return before_states(groups, self.computed)

    @property
    def free_blocks(self) -> jax.Array:
        """Blocks that can be handed out, int32[]; those that still hold reusable prefixes among them."""
        return self.state.counters[StepCounter.TAIL] - self.state.counters[StepCounter.HEAD]

    @property
    def evictions(self) -> jax.Array:
        """Cached blocks that were handed out to another use so far, int32[]."""
        return self.state.counters[StepCounter.EVICTIONS]


@pytree()
@dataclasses.dataclass(frozen=True)
class LongestHit:
    """The longest cached prefix of a prompt. Lengths are tokens.

    Attributes:
      length: int32[], the longest length at which every group can resume.
      alone: int32[G], the longest one of each group by itself.
    """

    length: jax.Array
    alone: jax.Array


@pytree()
@dataclasses.dataclass(frozen=True)
class RowAllocation:
    """Status, hit and slots of one row.

    Attributes:
      status: int32[], `hkv.Status`; all but OK took nothing.
      hit: int32[], tokens found in the cache, of a request that begins; else 0.
      allowed: int32[], tokens after the hit that may be computed at once; fewer than asked only with CROSSES_STATE.
      blocks: int32[G, T], the block in which each token after the hit is written, -1 for none.
      offsets: int32[G, T], its offset in that block, in tokens, -1 for none.
      reads: int32[G], the block of the state after the tokens before, for recurrent and opaque groups; 0 for none.
      writes: int32[G], the block for the state after the new tokens; -1 for none.
      registered: int32[G], tokens up to the end of the last block, or state, that others find now; 0 for none.
      copies: int32[G, 2], block and its copy, to be copied first; -1 twice for none. None where hits end with blocks.
      checkpoints: int32[G, 2], how many of the tokens after the hit a state stands after that the chunk leaves behind
        inside it, and the block to write it to; -1 twice for none. None where no group has such states.
    """

    status: jax.Array
    hit: jax.Array
    allowed: jax.Array
    blocks: jax.Array
    offsets: jax.Array
    reads: jax.Array
    writes: jax.Array
    registered: jax.Array
    copies: jax.Array | None = None
    checkpoints: jax.Array | None = None


def cache_config(
    topology: Topology,
    num_blocks: int,
    *,
    caching: bool = True,
    max_model_len: int = 1 << 20,
    max_in_flight_tokens: int | None = None,
    watermark: float = 0.0,
    retention_interval: int | None = None,
    prefix_match_unit: int | None = None,
) -> VllmConfig:
    """The configuration of a cache of these groups, its block sizes as vLLM 0.33 resolves them.

    Args:
      topology: the groups; their blocks come from one pool.
      num_blocks: blocks in the pool, the null block 0 included.
      caching: whether prefixes are reused.
      max_model_len: tokens of the longest request.
      max_in_flight_tokens: tokens that may be computed but not yet processed; None for `max_model_len`.
      watermark: share of the pool that admission leaves free while something is running.
      retention_interval: tokens between lengths before which windows and recurrent groups keep blocks, besides the
        prompts' ends; 0 for those alone, as vLLM 0.33 does unless told otherwise; None for every length.
      prefix_match_unit: tokens between two lengths at which hits may end, also inside blocks, a divisor of every block;
        None for hits that end with blocks. It needs recurrent groups with larger blocks, and of other kinds than full
        attention only groups with blocks of just as many tokens (vLLM 0.33 `partial_hash_hits_enabled`).

    Raises:
      ConfigError: the rules forbid such a cache.
    """
    scheduler_block, hash_block = default_block_sizes(topology)
    if prefix_match_unit is not None:
        hash_block = prefix_match_unit
        if not default_partial_hits(topology.specs, hash_block, caching=caching):
            expected = "None: hits cannot end inside the blocks of these groups"
            raise ConfigError("prefix_match_unit", prefix_match_unit, expected)
    return VllmConfig(
        topology=topology,
        num_blocks=num_blocks,
        hash_block_size=hash_block,
        scheduler_block_size=scheduler_block,
        caching=caching,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        watermark=watermark,
        retention_interval=retention_interval,
        partial_hits=prefix_match_unit is not None,
    )


def init(config: VllmConfig, *, rows: int, row_blocks: int) -> Cache:
    """An empty cache.

    Args:
      config: the configuration, from `cache_config` or a plan.
      rows: requests at the same time, R.
      row_blocks: most blocks of a request in one group, W.

    Raises:
      ConfigError: the configuration has what whole steps cannot express, or does not fit.
    """
    parameters, empty = state.init(config, rows=rows, row=row_blocks)
    sizes, unit = tuple(config.block_sizes), state.registration_unit(config)
    # Not by jnp.asarray, which compiles a program for each shape.
    return jax.device_put(Cache(parameters, empty, sizes, unit, state.extra_blocks(config)))


@typed_jit(donate_argnames="cache")
def arrive(
    cache: Cache,
    rows: Ids,
    tokens: jax.Array,
    counts: Ids,
    roots: jax.Array | None = None,
    prompts: Ids | None = None,
) -> tuple[Cache, ArrivalResult]:
    """Requests begin in empty rows with the longest prefix that the cache has; `step` computes the rest.

    Args:
      cache: donated.
      rows: int[K], the rows they take, all different; -1 for none.
      tokens: int[K, P], their prompts, padded.
      counts: int[K], tokens of each prompt.
      roots: uint32[K, 4], the same words for requests that may share blocks; None where all may.
      prompts: int[K], tokens that are the prompt, of requests that come again with what they generated; None where all
        are. Sparse retention keeps what a repetition of the prompt needs.

    Returns:
      The cache, and the hits.

    Raises:
      OperationError: an array of another shape or dtype, or an empty one.
    """
    rows = _some("rows", require_array("rows", rows, (None,)))
    size = rows.shape[0]
    tokens = _some("tokens", require_array("tokens", tokens, (size, None)))
    counts = require_array("counts", counts, (size,))
    roots = _roots(size) if roots is None else require_array("roots", roots, (size, 4), np.uint32)
    prompts = counts if prompts is None else require_array("prompts", prompts, (size,))
    after, found = arrivals.arrive(cache.parameters, cache.state, Arrivals(rows, roots, tokens, counts, prompts))
    return _with(cache, after), found


@typed_jit(donate_argnames="cache")
def step(
    cache: Cache,
    tokens: jax.Array,
    cu_q_lens: Ids,
    rows: Ids | None = None,
    drafts: Ids | None = None,
    in_flight: Ids | None = None,
) -> tuple[Cache, StepResult]:
    """One serving step: rows give back what they cannot read any more, and get slots for their new tokens.

    Q queries, N tokens, one query's after the other's, as kernels for ragged attention take them.

    Args:
      cache: donated.
      tokens: int[N], the new tokens of every query, its drafts last; behind the last query, anything.
      cu_q_lens: int[Q + 1], where each query begins; the last entry is where the last one ends. A query without tokens
        leaves its row out.
      rows: int[Q], the row of each query, all different, -1 for none; None where query i is row i's.
      drafts: int[Q], how many of its last tokens are drafts, which need slots and are not registered; None for none.
      in_flight: int[Q], of the tokens computed before, those whose steps have not come back; None for none.

    Returns:
      The cache; the slots of every token, and a status for each query.

    Raises:
      OperationError: an array of another shape or dtype; more queries than rows.
    """
    tokens, cu_q_lens = require_array("tokens", tokens, (None,)), require_array("cu_q_lens", cu_q_lens, (None,))
    queries, size = cu_q_lens.shape[0] - 1, tokens.shape[0]
    if not 1 <= queries <= cache.tables.shape[0] or not size:
        expected = f"1 to {cache.tables.shape[0]} queries, and at least one token"
        raise OperationError("cu_q_lens", f"{queries} queries of {size} tokens", expected)
    none = jnp.zeros_like(cu_q_lens, shape=queries)
    batch = StepBatch(
        tokens,
        cu_q_lens,
        count_up(queries) if rows is None else require_array("rows", rows, (queries,)),
        none if drafts is None else require_array("drafts", drafts, (queries,)),
        none if in_flight is None else require_array("in_flight", in_flight, (queries,)),
    )
    room = state.room_of(cache.block_sizes, cache.unit, cache.extra, queries, size)
    after, result = whole.step(cache.parameters, cache.state, batch, room=room)
    return _with(cache, after), result


@typed_jit(donate_argnames="cache")
def finish(cache: Cache, rows: Ids) -> tuple[Cache, jax.Array]:
    """Requests end and give back all they hold; their prefixes stay in the cache until their blocks are reused.

    Args:
      cache: donated.
      rows: int[K], different rows; -1 for none.

    Returns:
      The cache, and a status int32[K].

    Raises:
      OperationError: an array of another shape or dtype, or an empty one.
    """
    after, status = whole.finish(cache.state, _some("rows", require_array("rows", rows, (None,))))
    return _with(cache, after), status


@typed_jit()
def longest_hit(cache: Cache, tokens: jax.Array, count: Ids | int | None = None) -> LongestHit:
    """The longest prefix of a prompt that the cache has; nothing changes.

    Args:
      cache: the cache, not donated.
      tokens: int[P], the prompt.
      count: int[], tokens of it; None for all. Nothing is found for a count outside the prompt.

    Raises:
      OperationError: an array of another shape or dtype, or a prompt of no token.
    """
    tokens = _some("tokens", require_array("tokens", tokens, (None,)))
    count = _count(tokens, count)
    counts = jnp.where((count >= 0) & (count <= tokens.shape[0]), count, 0)[None]
    *_, found = arrivals.look_up(cache.parameters, cache.state, _roots(1), tokens[None], counts)
    return LongestHit(found.hits[0], found.alone[0])


@typed_jit(donate_argnames="cache")
def allocate(
    cache: Cache,
    row: Ids | int,
    tokens: jax.Array,
    count: Ids | int | None = None,
    drafts: Ids | int = 0,
) -> tuple[Cache, RowAllocation]:
    """Blocks for the next tokens of one row: of an empty row, for a whole prompt, after its longest hit.

    It is `arrive`, where the row is empty, and a `step` of this row alone. A request that begins and is refused leaves
    everything as it was; one that runs has given back what it cannot read any more, as vLLM 0.33 does. Takes time of
    the pool's size.

    Args:
      cache: donated.
      row: int[], the row.
      tokens: int[T], its next tokens.
      count: int[], how many of them; None for all.
      drafts: int[], how many of those, the last ones, are drafts: they need slots, and are not registered.

    Returns:
      The cache, and the slots.

    Raises:
      OperationError: an array of another shape or dtype, or no token.
    """
    text = _some("tokens", require_array("tokens", tokens, (None,)))
    given = require_array("row", row, ()), text, require_array("drafts", drafts, ())
    cache, at, text, drafted, total, roots = unified(cache, *given, _count(given[1], count), _roots(1))
    parameters, before = cache.parameters, cache.state
    rows, groups, width = before.rows.shape
    known = (at >= 0) & (at < rows)
    runs = known & (before.requests[jnp.where(known, at, 0), StepRequest.LIVE] != 0)
    prompt = Arrivals(at[None], roots, text[None], (total - drafted)[None])

    def go_on(now: StepState) -> tuple[StepState, jax.Array, jax.Array]:
        return now, jnp.zeros_like(at), jnp.zeros_like(at)

    def begin(now: StepState) -> tuple[StepState, jax.Array, jax.Array]:
        after, found = arrivals.arrive(parameters, now, prompt)
        return after, found.status[0], found.hits[0]

    after, status, hit = lax.cond(runs, go_on, begin, before)
    good = (status == int(Status.OK)) & known
    ends = jnp.stack([jnp.zeros_like(total), jnp.where(good, total - hit, 0)])
    batch = StepBatch(jnp.roll(text, -hit), ends, at[None], drafted[None], jnp.zeros_like(at[None]))
    # One row cannot give back, be given or register more blocks than its tables have entries.
    after, result = whole.step(parameters, after, batch, room=groups * width)
    status = jnp.where(known, jnp.where(good, result.status[0], status), int(Status.NO_SUCH_SLOT)).astype(jnp.int32)
    refused = ~runs & (status != int(Status.OK))
    after = jax.tree.map(lambda new, old: jnp.where(refused, old, new), after, before)
    answer = RowAllocation(
        status=status,
        hit=jnp.where(refused, 0, hit),
        allowed=jnp.where(good, result.allowed[0], 0),
        blocks=result.blocks,
        offsets=result.offsets,
        reads=result.reads[0],
        writes=result.writes[0],
        registered=result.registered[0],
        copies=None if result.copies is None else result.copies[0],
        checkpoints=None if result.checkpoints is None else result.checkpoints[0],
    )
    return _with(cache, after), answer


@typed_jit(donate_argnames="cache")
def free(cache: Cache, row: Ids | int) -> tuple[Cache, jax.Array]:
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


def _some(name: str, array: jax.Array) -> jax.Array:
    """The array, if it has elements: compiled code indexes its first."""
    if not array.size:
        raise OperationError(name, f"{array.dtype}{list(array.shape)}", "at least one")
    return array


def _roots(size: int) -> jax.Array:
    return jnp.tile(jnp.array(ROOT, jnp.uint32), (size, 1))


def _count(tokens: jax.Array, count: jax.Array | int | None) -> jax.Array:
    return jnp.int32(tokens.shape[0]) if count is None else require_array("count", count, ())
