"""A served model's cache and pool as one pytree, and what a forward pass does with them."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache import cache as caches
from hkv.cache.arrivals import ArrivalResult
from hkv.cache.cache import Cache
from hkv.cache.ragged import token_queries
from hkv.cache.spans import count_up
from hkv.cache.state import PAD, StepResult
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.planning.cache_plan import CachePlan
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.errors import ConfigError, OperationError
from hkv.paged import operations as paged
from hkv.paged.ragged_attention import attention
from hkv.serving.copies import copied
from hkv.serving.pages import LayerPages, overlaid, placed, state_unit
from hkv.state.status import Status

Values = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
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
    """

    cache: Cache
    pool: jax.Array
    layers: tuple[LayerPages, ...] = dataclasses.field(metadata={"static": True})
    state_unit: int = dataclasses.field(metadata={"static": True})
    tail_unit: int = dataclasses.field(metadata={"static": True}, default=0)

    def layer(self, name: str) -> LayerPages:
        """The place of a layer.

        Raises:
          OperationError: no such layer.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise OperationError("layer", name, f"one of {', '.join(layer.name for layer in self.layers)}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """Metadata for a forward pass over one step's Q queries and N tokens.

    Attributes:
      result: slots, state blocks and statuses.
      served: bool[Q], queries that are computed; the others took nothing, and their tokens are padding.
      positions: int32[N], the position of each token in its request; -1 for padding.
      cu_q_lens: int32[Q + 1], where each query begins, as the step was given them.
      kv_lens: int32[Q], tokens of each row once the query is written, drafts included; 0 for those not served.
      tables: int32[Q, G, W], block ids of each query's row; 0, the null block, where there is none.
    """

    result: StepResult
    served: jax.Array
    positions: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    tables: jax.Array


def from_plan(
    plan: CachePlan,
    *,
    rows: int,
    row_blocks: int | None = None,
    worker: int = 0,
    retention_interval: int | None = None,
) -> Serving:
    """The cache and the empty pool that a plan describes, of one worker.

    Args:
      plan: from `hkv.plan`. Its memory is taken.
      rows: requests at the same time, R.
      row_blocks: most blocks of a request in one group; None for as many as the plan's longest request needs, with
        states for its drafts.
      worker: index of the worker.
      retention_interval: as in `hkv.cache_config`; vLLM 0.33's default is 0.

    Raises:
      ConfigError: the plan has what whole steps cannot express, named.
    """
    config = dataclasses.replace(plan.config(), retention_interval=retention_interval)
    groups = {name: index for index, group in enumerate(plan.served.plan.groups) for name in group.names}
    layouts = plan.layouts(worker)
    size = max(tensor.size for tensor in plan.served.plan.workers[worker].tensors)
    return _made(config, layouts, groups, size, rows, row_blocks)


def from_config(config: VllmConfig, *, rows: int, row_blocks: int | None = None, order: str = "LBNHC") -> Serving:
    """The cache of a configuration whose groups name their layers, and an empty pool in which the groups overlap.

    Args:
      config: the configuration, from `hkv.cache_config`.
      rows: requests at the same time, R.
      row_blocks: most blocks of a request in one group; None for as many as `max_model_len` tokens need, with states
        for their drafts.
      order: physical order of the pool's axes, one that keeps a page together.

    Raises:
      ConfigError: the configuration has what whole steps cannot express, or a group names no layers.
      LayoutError: pages that cannot lie so.
    """
    layouts, groups, size = overlaid(config, order)
    return _made(config, layouts, groups, size, rows, row_blocks)


def _made(
    config: VllmConfig, layouts: Mapping[str, Any], groups: Mapping[str, int], size: int, rows: int, width: int | None
) -> Serving:
    cache = caches.init(config, rows=rows, row_blocks=_longest(config) if width is None else width)
    pool = jnp.zeros(-(-size // 4), jnp.uint32)
    tail = config.hash_block_size if config.partial_hits else 0
    return Serving(cache, pool, placed(config, layouts, groups), state_unit(config), tail)


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
    return dataclasses.replace(serving, cache=cache), found


def finish(serving: Serving, rows: jax.Array) -> tuple[Serving, jax.Array]:
    """Requests end and give back all they hold: `hkv.finish`."""
    cache, status = caches.finish(serving.cache, rows)
    return dataclasses.replace(serving, cache=cache), status


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
    before = serving.cache.computed
    cache, result = caches.step(serving.cache, tokens, cu_q_lens, rows, drafts, in_flight)
    queries = cu_q_lens.shape[0] - 1
    at = count_up(queries) if rows is None else rows.astype(jnp.int32)
    starts = cu_q_lens.astype(jnp.int32)
    asked = starts[1:] - starts[:-1]
    drafted = jnp.zeros_like(asked) if drafts is None else drafts.astype(jnp.int32)
    served = (result.status == int(Status.OK)) & (at >= 0) & (asked > drafted)
    place = jnp.where(served, at, 0)
    kv_lens = jnp.where(served, before[place] + asked, 0)
    query, within = token_queries(starts, tokens.shape[0])
    live = (within >= 0) & (within < asked[query]) & served[query]
    positions = jnp.where(live, before[place][query] + within, PAD)
    tables = jnp.where(served[:, None, None], cache.tables[place], 0)
    turn = Turn(result, served, positions, starts, kv_lens, tables)
    pool = serving.pool if result.copies is None else copied(serving.pool, serving.layers, result.copies)
    return dataclasses.replace(serving, cache=cache, pool=pool), turn


def write(serving: Serving, layer: str, turn: Turn, values: Values) -> Serving:
    """The new tokens' keys and values, or latents, in their slots.

    Outside a `jit` of the caller's its pool is donated: do not use the old `serving` again.

    Args:
      serving: the cache and its pool.
      layer: the layer's name (static).
      turn: of this step.
      values: per part of the page, `[N, heads, *part.shape]` of the part's dtype. Padding is written nowhere.

    Raises:
      LayoutError: parts of another name, shape or dtype.
    """
    at = serving.layer(layer)
    blocks, offsets = turn.result.blocks[at.group], turn.result.offsets[at.group]
    pool, _ = paged.write(serving.pool, at.layout, at.index, blocks, offsets, values)
    return dataclasses.replace(serving, pool=pool)


def attend(serving: Serving, layer: str, turn: Turn, query: jax.Array, **settings: Any) -> jax.Array:
    """Attention of the step's queries over their rows' pages, after `write`; what a query sees is the layer's kind's.

    Args:
      serving: the cache and its pool.
      layer: the layer's name (static).
      turn: of this step.
      query: float `[N, query heads, elements]`.
      settings: `scale`, `soft_cap`, `sinks`, `key_scale`, `value_scale`, `value_size` of
        `hkv.paged.ragged_attention.attention`.

    Returns:
      `[N, query heads, value elements]`, zeros for padding.

    Raises:
      ConfigError: a kind that reads neither a window nor a chunk nor all.
      LayoutError: pages without keys and values, or a query of another shape.
    """
    at = serving.layer(layer)
    seen: dict[str, Any] = {"sink_tokens": at.sink_tokens}
    if at.unit > 1 and at.reach:
        raise ConfigError(f"layers[{layer!r}]", f"unit {at.unit}, reach {at.reach}", "a window, chunks or all tokens")
    if at.unit > 1:
        seen["chunk"] = at.unit
    elif at.reach < UNLIMITED:
        seen["window"] = at.reach + 1
    table = turn.tables[:, at.group]
    return attention(serving.pool, at.layout, at.index, query, table, turn.cu_q_lens, turn.kv_lens, **seen, **settings)


def gather(serving: Serving, layer: str, row: jax.Array | int) -> dict[str, jax.Array]:
    """A row's pages of one layer, block after block, zeros for null blocks.

    Returns:
      Per part `[W * states in a block, heads, *part.shape]`.
    """
    at = serving.layer(layer)
    found, _ = paged.gather(serving.pool, at.layout, at.index, serving.cache.tables[row, at.group])
    return _read_once(found)


def read_state(serving: Serving, layer: str, turn: Turn) -> dict[str, jax.Array]:
    """The state before each query, per part `[Q, *part.shape]`; zeros for those that begin.

    Read it before any state of this layer is written.
    """
    at = serving.layer(layer)
    found, _ = paged.gather(serving.pool, at.layout, at.index, turn.result.reads[:, at.group])
    return {name: part[:, 0] for name, part in _read_once(found).items()}


def checkpoint_tokens(serving: Serving, layer: str, turn: Turn) -> jax.Array:
    """Number of each query's tokens after which it leaves a state behind inside it, int32[Q]; -1 for none.

    For `write_state`'s `checkpoints`, where a recurrent layer's group has `num_prefill_checkpoint_blocks`.
    """
    at, found = serving.layer(layer), turn.result.checkpoints
    return jnp.full_like(turn.kv_lens, PAD) if found is None else found[:, at.group, 0]


def write_state(serving: Serving, layer: str, turn: Turn, values: Values, checkpoints: Values | None = None) -> Serving:
    """The state after each query's tokens, drafts not among them: per part `[Q, *part.shape]` of the part's dtype.

    Donates its pool as `write` does.

    Args:
      serving: the cache and its pool.
      layer: the layer's name (static).
      turn: of this step.
      values: the states.
      checkpoints: the states after `checkpoint_tokens` of each query, of the same shapes; anything for queries that
        leave none. None only where no group has `num_prefill_checkpoint_blocks`: others will find them.

    Raises:
      OperationError: no `checkpoints` where groups have them.
    """
    at, found = serving.layer(layer), turn.result.checkpoints
    if found is not None and checkpoints is None:
        raise OperationError("checkpoints", None, "the states after checkpoint_tokens, as chunks leave states behind")
    due = [(turn.result.writes[:, at.group], values)]
    if found is not None and checkpoints is not None:
        due.append((found[:, at.group, 1], checkpoints))
    pool = serving.pool
    for blocks, states in due:
        parts = {name: part[:, None] for name, part in states.items()}
        pool, _ = paged.write(pool, at.layout, at.index, blocks, jnp.zeros_like(blocks), parts)
    return dataclasses.replace(serving, pool=pool)


def _read_once(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parts that were gathered, gathered once: else XLA may read again behind a later write, and copies the pool."""
    return lax.optimization_barrier(found)
