"""A served model's cache and pool as one pytree, and what a forward pass does with them."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.cache import cache as caches
from hkv.cache.arrivals import ArrivalResult
from hkv.cache.cache import Cache
from hkv.cache.spans import count_up, token_queries
from hkv.cache.state import PAD, StepResult
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.errors import ConfigError, LayoutError, OperationError
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import Part
from hkv.paged import operations as paged
from hkv.paged.ragged_attention import attention
from hkv.pytrees import pytree
from hkv.serving import marks
from hkv.serving.marks import Marks, Span
from hkv.serving.pages import LayerPages, LayerStack, copied, overlaid, placed, stacked, state_unit
from hkv.state.status import Status
from hkv.typed_jit import require_array

Values = Mapping[str, jax.Array]


class Settings(TypedDict, total=False):
    """Settings of `attend`: those of `hkv.paged.ragged_attention.attention` that a layer's kind does not decide."""

    scale: jax.Array | float | None
    soft_cap: jax.Array | float | None
    sinks: jax.Array | None
    key_scale: jax.Array | float
    value_scale: jax.Array | float
    value_size: int | None


@pytree(LayerPages, Layout, Order, Part)
@dataclasses.dataclass(frozen=True)
class Serving:
    """A cache of R rows and G groups, and its pages. Immutable; a pytree; donate it to the `jit` that replaces it.

    Attributes:
      cache: blocks, rows and keys.
      pool: uint32[words], the bytes of all layers' pages.
      layers: static; every layer's place.
      state_unit: static; tokens at whose multiples recurrent states are kept; 1 where there are none.
      tail_unit: static; tokens at whose last multiple in a prompt a state is kept besides; 0 where hits end with
        blocks.
      marks: what has been written, in debug mode; None outside it.
      readers: static; layers without a cache of their own, and the layer of `layers` whose cache each reads.
    """

    cache: Cache
    pool: jax.Array
    layers: tuple[LayerPages, ...] = dataclasses.field(metadata={"static": True})
    state_unit: int = dataclasses.field(metadata={"static": True})
    tail_unit: int = dataclasses.field(metadata={"static": True}, default=0)
    marks: Marks | None = None
    readers: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True}, default=())

    def stack(self, names: Sequence[str]) -> LayerStack:
        """Layers as data, for a `lax.scan` over them: `write` and `attend`, `read_state` and `write_state` take each.

        Raises:
          OperationError: no layer, pages of different shapes, or a layer that reads another's cache.
        """
        if not names:
            raise OperationError("names", list(names), "at least one layer")
        layers = [self.layer(name, owned=True) for name in names]
        return stacked(layers, [self.layers.index(layer) for layer in layers])

    def layer(self, name: str, *, states: bool | None = None, owned: bool = False) -> LayerPages:
        """The place of a layer; of one that reads another's cache, that other layer's.

        Args:
          name: the layer's.
          states: whether it has to be one of states (True) or of tokens (False); None for either.
          owned: whether it has to have a cache of its own, to write.

        Raises:
          OperationError: no such layer, one of the other kind, or one that reads another's cache.
        """
        owner = dict(self.readers).get(name, name)
        if owned and owner != name:
            raise OperationError("layer", name, f"a layer with a cache of its own; this one reads that of {owner}")
        for layer in self.layers:
            if layer.name == owner:
                break
        else:
            known = *(layer.name for layer in self.layers), *dict(self.readers)
            raise OperationError("layer", name, f"one of {', '.join(known)}")
        _require_kind(layer, states)
        return layer


@pytree()
@dataclasses.dataclass(frozen=True)
class Turn:
    """Metadata for a forward pass over one step's Q queries and N tokens.

    Attributes:
      result: slots, state blocks and statuses.
      served: bool[Q], queries that are computed; the others took nothing, and their tokens are padding.
      positions: int32[N], the position of each token in its request; -1 for padding.
      cu_q_lens: int32[Q + 1], where each query begins, as the step was given them.
      kv_lens: int32[Q], tokens of each row once the query is written, drafts included; 0 for those not served.
      tables: int32[Q, G, W], block ids of each query's row; 0 is the null block.
      span: the step and its tokens, in debug mode; None outside it.
    """

    result: StepResult
    served: jax.Array
    positions: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    tables: jax.Array
    span: Span | None = None


def from_plan(
    plan: CachePlan,
    *,
    rows: int,
    row_blocks: int | None = None,
    worker: int = 0,
    retention_interval: int | None = None,
    debug: bool = False,
) -> Serving:
    """The cache and the empty pool that a plan describes, of one worker.

    Args:
      plan: from `hkv.plan`. Its memory is taken.
      rows: requests at the same time, R.
      row_blocks: most blocks of a request in one group; None for as many as the plan's longest request needs, with
        states for its drafts.
      worker: index of the worker.
      retention_interval: as in `hkv.cache_config`; vLLM 0.33's default is 0.
      debug: whether every read is checked (`hkv.serving.marks`): a byte a slot and layer, and `checkify` inside `jit`.

    Raises:
      ConfigError: the plan has what whole steps cannot express, named.
    """
    config = dataclasses.replace(plan.config(), retention_interval=retention_interval)
    groups = {name: index for index, group in enumerate(plan.served.plan.groups) for name in group.names}
    layouts = plan.layouts(worker)
    size = max(tensor.size for tensor in plan.served.plan.workers[worker].tensors)
    readers = {layer.name: layer.shares for layer in plan.model.layers if layer.shares is not None}
    return _made(config, layouts, groups, readers, size, rows, row_blocks, debug)


def from_config(
    config: VllmConfig, *, rows: int, row_blocks: int | None = None, order: str = "LBNHC", debug: bool = False
) -> Serving:
    """The cache of a configuration whose groups name their layers, and an empty pool in which the groups overlap.

    Args:
      config: the configuration, from `hkv.cache_config`.
      rows: requests at the same time, R.
      row_blocks: most blocks of a request in one group; None for as many as `max_model_len` tokens need, with states
        for their drafts.
      order: physical order of the pool's axes, one that keeps a page together.
      debug: as in `from_plan`.

    Raises:
      ConfigError: the configuration has what whole steps cannot express, or a group names no layers.
      LayoutError: pages that cannot lie so.
    """
    layouts, groups, size = overlaid(config, order)
    readers = {layer.name: layer.cache_of for layer in config.topology.layers if layer.cache_of is not None}
    return _made(config, layouts, groups, readers, size, rows, row_blocks, debug)


def _made(
    config: VllmConfig,
    layouts: Mapping[str, Any],
    groups: Mapping[str, int],
    readers: Mapping[str, str],
    size: int,
    rows: int,
    width: int | None,
    debug: bool,
) -> Serving:
    cache = caches.init(config, rows=rows, row_blocks=_longest(config) if width is None else width)
    pool = jnp.zeros(-(-size // 4), jnp.uint32)
    tail = config.hash_block_size if config.partial_hits else 0
    layers = placed(config, layouts, groups)
    written = marks.unwritten(layers, rows) if debug else None
    # A stage of a pipeline has some of the layers.
    held = tuple((name, owner) for name, owner in readers.items() if owner in layouts)
    return Serving(cache, pool, layers, state_unit(config), tail, written, held)


def _longest(config: VllmConfig) -> int:
    """Entries of the longest request's row, states for drafts included (vLLM 0.33 `max_num_blocks_per_req`)."""
    groups = zip(config.block_sizes, config.topology.specs, strict=True)
    return max(-(-config.max_model_len // size) + spec.scratch_blocks for size, spec in groups)


def arrive(
    serving: Serving,
    rows: jax.Array,
    tokens: jax.Array,
    counts: jax.Array,
    roots: jax.Array | None = None,
    prompts: jax.Array | None = None,
) -> tuple[Serving, ArrivalResult]:
    """Requests begin in empty rows with the longest prefix that the cache has: `hkv.arrive`."""
    cache, found = caches.arrive(serving.cache, rows, tokens, counts, roots, prompts)
    if serving.marks is not None:
        took = (found.status == int(Status.OK)) & (jnp.asarray(rows) >= 0)
        tables = cache.tables[jnp.where(took, rows, 0)]
        marks.require_found(serving.marks, serving.layers, tables, jnp.where(took, found.hits, 0))
    return dataclasses.replace(serving, cache=cache), found


def finish(serving: Serving, rows: jax.Array) -> tuple[Serving, jax.Array]:
    """Requests end and give back all they hold: `hkv.finish`."""
    cache, status = caches.finish(serving.cache, rows)
    written = serving.marks
    if written is not None:
        written = marks.with_ended(written, jnp.asarray(rows), status == int(Status.OK))
    return dataclasses.replace(serving, cache=cache, marks=written), status


def step(
    serving: Serving,
    tokens: jax.Array,
    cu_q_lens: jax.Array,
    rows: jax.Array | None = None,
    drafts: jax.Array | None = None,
    in_flight: jax.Array | None = None,
) -> tuple[Serving, Turn]:
    """Blocks, slots and metadata for the new tokens of some rows: `hkv.step`, and what a forward pass asks of it.

    Blocks that hits end inside are copied here, before anything is written: every earlier step's pages and states have
    to be in the pool.
    """
    if serving.marks is not None:
        marks.require_batch(jnp.asarray(cu_q_lens, jnp.int32), tokens.shape[0])
    before = serving.cache.computed
    cache, result = caches.step(serving.cache, tokens, cu_q_lens, rows, drafts, in_flight)
    queries = cu_q_lens.shape[0] - 1
    at = count_up(queries) if rows is None else jnp.asarray(rows, jnp.int32)
    starts = jnp.asarray(cu_q_lens, jnp.int32)
    asked = starts[1:] - starts[:-1]
    drafted = jnp.zeros_like(asked) if drafts is None else drafts.astype(jnp.int32)
    served = (result.status == int(Status.OK)) & (at >= 0) & (asked > drafted)
    place = jnp.where(served, at, 0)
    kv_lens = jnp.where(served, before[place] + asked, 0)
    query, within = token_queries(starts, tokens.shape[0])
    live = (within >= 0) & (within < asked[query]) & served[query]
    positions = jnp.where(live, before[place][query] + within, PAD)
    tables = jnp.where(served[:, None, None], cache.tables[place], 0)
    pool = serving.pool if result.copies is None else copied(serving.pool, serving.layers, result.copies)
    written, span = serving.marks, None
    if written is not None:
        lengths = before[place], cache.computed[place]
        rows_served = jnp.where(served, at, PAD)
        written, span = marks.handed_out(written, serving.layers, result, tokens, rows_served, lengths)
    turn = Turn(result, served, positions, starts, kv_lens, tables, span)
    return dataclasses.replace(serving, cache=cache, pool=pool, marks=written), turn


def write(serving: Serving, layer: str | LayerStack, turn: Turn, values: Values) -> Serving:
    """The new tokens' keys and values, or latents, in their slots.

    Outside a `jit` of the caller's its pool is donated: do not use the old `serving` again.

    Args:
      serving: the cache and its pool.
      layer: the layer's name (static), or one of a `Serving.stack`.
      turn: of this step.
      values: every part of the page, `[N, heads, *part.shape]` of the part's dtype. Padding is written nowhere.

    Raises:
      OperationError: a layer of states, or one that reads another's cache.
      LayoutError: parts of another name, shape or dtype, or not all of them.
    """
    at, _ = _place(serving, layer, states=False, owned=True)
    _require_parts("values", at, values)
    marked = mark_written(serving, layer, turn)
    blocks, offsets = turn.result.blocks[at.group], turn.result.offsets[at.group]
    pool, _ = paged.write(serving.pool, at.layout, at.index, blocks, offsets, values)
    return dataclasses.replace(marked, pool=pool)


def mark_written(serving: Serving, layer: str | LayerStack, turn: Turn) -> Serving:
    """Tells the debug mode that code of the caller's, a kernel, has written a layer's new tokens or states in the pool.

    Changes nothing outside debug mode. `write` and `write_state` need it not.
    """
    if (written := serving.marks) is None:
        return serving
    at, index = _place(serving, layer, owned=True)
    span = _span(serving, turn, "write_state" if at.states else "write")
    if at.states:
        written = marks.with_states(written, index, at, turn.result.writes[:, at.group], span.after)
        if (left := turn.result.checkpoints) is not None:
            left = left[:, at.group]
            written = marks.with_states(written, index, at, left[:, 1], span.before + left[:, 0])
    else:
        written = marks.with_slots(written, index, at, turn.result.blocks[at.group], turn.result.offsets[at.group])
    return dataclasses.replace(serving, marks=written)


def attend(
    serving: Serving, layer: str | LayerStack, turn: Turn, query: jax.Array, **settings: Unpack[Settings]
) -> jax.Array:
    """Attention of the step's queries over their rows' pages, after `write`; what a query sees is the layer's kind's.

    Args:
      serving: the cache and its pool.
      layer: the layer's name (static), or one of a `Serving.stack`.
      turn: of this step.
      query: float `[N, query heads, elements]`.
      settings: `scale`, `soft_cap`, `sinks`, `key_scale`, `value_scale`, `value_size`; no others.

    Returns:
      `[N, query heads, value elements]`, zeros for padding.

    Raises:
      OperationError: a layer of states; another setting.
      ConfigError: a kind that reads neither a window nor a chunk nor all.
      LayoutError: pages without keys and values, or a query of another shape.
    """
    at, index = _place(serving, layer, states=False)
    for name in settings.keys() - Settings.__annotations__.keys():
        expected = f"one of {', '.join(Settings.__annotations__)}: what a query sees is the layer's kind's"
        raise OperationError("settings", name, expected)
    seen: dict[str, Any] = {"sink_tokens": at.sink_tokens}
    if at.unit > 1 and isinstance(at, LayerPages) and at.lookback:
        raise ConfigError(
            f"layers[{layer!r}]", f"unit {at.unit}, lookback {at.lookback}", "a window, chunks or all tokens"
        )
    if at.unit > 1:
        seen["chunk"] = at.unit
    elif isinstance(at, LayerStack) or at.lookback < UNLIMITED:
        seen["window"] = at.lookback + 1
    table = turn.tables[:, at.group]
    if serving.marks is not None:
        span = _span(serving, turn, "attend")
        marks.require_seen(serving.marks, index, at, table, span.before, turn.kv_lens)
    return attention(serving.pool, at.layout, at.index, query, table, turn.cu_q_lens, turn.kv_lens, **seen, **settings)


def gather(serving: Serving, layer: str, row: jax.Array | int) -> dict[str, jax.Array]:
    """A row's pages of one layer, block after block, zeros for null blocks.

    Returns:
      Per part `[W * states in a block, heads, *part.shape]`.

    Raises:
      OperationError: a row that is no integer, or a number of none.
    """
    at, rows = serving.layer(layer), serving.cache.tables.shape[0]
    if isinstance(row, int | np.integer) and not 0 <= row < rows:
        raise OperationError("row", int(row), f"a row from 0 to {rows - 1}")
    row = require_array("row", row, ())
    if serving.marks is not None:
        marks.require_row(row, rows)
    found, _ = paged.gather(serving.pool, at.layout, at.index, serving.cache.tables[row, at.group])
    return _read_once(found)


def read_state(serving: Serving, layer: str | LayerStack, turn: Turn) -> dict[str, jax.Array]:
    """The state before each query, per part `[Q, *part.shape]`; zeros for those that begin.

    Read it before any state of this layer is written.

    Raises:
      OperationError: a layer of tokens.
    """
    at, index = _place(serving, layer, states=True)
    if serving.marks is not None:
        before = _span(serving, turn, "read_state").before
        marks.require_read(serving.marks, index, at, turn.result.reads[:, at.group], before)
    found, _ = paged.gather(serving.pool, at.layout, at.index, turn.result.reads[:, at.group])
    return {name: part[:, 0] for name, part in _read_once(found).items()}


def checkpoint_tokens(serving: Serving, layer: str | LayerStack, turn: Turn) -> jax.Array:
    """Number of each query's tokens after which it leaves a state behind inside it, int32[Q]; -1 for none.

    For `write_state`'s `checkpoints`, where a recurrent layer's group has `num_prefill_checkpoint_blocks`.
    """
    (at, _), found = _place(serving, layer, states=True), turn.result.checkpoints
    return jnp.full_like(turn.kv_lens, PAD) if found is None else found[:, at.group, 0]


def write_state(
    serving: Serving, layer: str | LayerStack, turn: Turn, values: Values, checkpoints: Values | None = None
) -> Serving:
    """The state after each query's tokens, drafts not among them: per part `[Q, *part.shape]` of the part's dtype.

    Donates its pool as `write` does.

    Args:
      serving: the cache and its pool.
      layer: the layer's name (static), or one of a `Serving.stack`.
      turn: of this step.
      values: the states.
      checkpoints: the states after `checkpoint_tokens` of each query, of the same shapes; anything for queries that
        leave none. None only where no group has `num_prefill_checkpoint_blocks`: others will find them.

    Raises:
      OperationError: a layer of tokens; no `checkpoints` where groups have them.
      LayoutError: parts of another name, shape or dtype, or not all of them.
    """
    (at, _), found = _place(serving, layer, states=True, owned=True), turn.result.checkpoints
    if found is not None and checkpoints is None:
        raise OperationError("checkpoints", None, "the states after checkpoint_tokens, as chunks leave states behind")
    due = [(turn.result.writes[:, at.group], values)]
    if found is not None and checkpoints is not None:
        due.append((found[:, at.group, 1], checkpoints))
    for (_, states), name in zip(due, ("values", "checkpoints"), strict=False):
        _require_parts(name, at, states)
    marked, pool = mark_written(serving, layer, turn), serving.pool
    for blocks, states in due:
        parts = {name: part[:, None] for name, part in states.items()}
        pool, _ = paged.write(pool, at.layout, at.index, blocks, jnp.zeros_like(blocks), parts)
    return dataclasses.replace(marked, pool=pool)


def _read_once(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parts that were gathered, gathered once: else XLA may read again behind a later write, and copies the pool."""
    return lax.optimization_barrier(found)


def _require_parts(name: str, at: LayerPages | LayerStack, values: Values) -> None:
    """Requires all parts of a page: what is not written would be read as whatever the block held before."""
    wanted = [part.name for part in at.layout.content]
    if set(values) != set(wanted):
        raise LayoutError(f"{name} of {at.name!r}", sorted(values), f"every part of its pages: {', '.join(wanted)}")


def _place(
    serving: Serving, layer: str | LayerStack, *, states: bool | None = None, owned: bool = False
) -> tuple[LayerPages | LayerStack, marks.Index]:
    """The place of a layer, and its place in `Serving.layers`."""
    if isinstance(layer, LayerStack):
        _require_kind(layer, states)
        if layer.number.ndim:
            raise OperationError("layer", f"a stack of {len(layer.number)} layers", "one of them, as lax.scan gives it")
        return layer, layer.number
    at = serving.layer(layer, states=states, owned=owned)
    return at, serving.layers.index(at)


def _require_kind(layer: LayerPages | LayerStack, states: bool | None) -> None:
    if states and not layer.states:
        raise OperationError("layer", layer.name, "a layer of states; this one keeps tokens, for write and attend")
    if states is False and layer.states:
        expected = "a layer of tokens; this one keeps states, for read_state, write_state"
        raise OperationError("layer", layer.name, expected)


def require_turn(serving: Serving, turn: Turn, caller: str) -> None:
    """Checks in debug mode that a turn is the last step's of this cache, and that its requests still run."""
    if serving.marks is not None:
        _span(serving, turn, caller)


def _span(serving: Serving, turn: Turn, caller: str) -> Span:
    """The tokens of a turn that a cache in debug mode is asked about, checked to be the last step's."""
    if serving.marks is None or turn.span is None:
        raise OperationError("turn", "a turn without debug marks", "the turn of a step of this cache, in debug mode")
    marks.require_turn(serving.marks, turn.span, caller)
    return turn.span
