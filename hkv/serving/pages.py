"""Places of the layers' pages in one pool, and the tokens that each layer reads: static, known before anything runs."""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hkv.cache.spans import running_sum
from hkv.cache.state import PAD
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.parameters import GroupField, of_config
from hkv.errors import ConfigError, OperationError
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import Part
from hkv.paged import operations as paged
from hkv.pytrees import pytree


@dataclasses.dataclass(frozen=True)
class LayerPages:
    """One layer of a served model.

    Attributes:
      name: the layer's.
      group: its group.
      layout: layout of the layers that it lies among.
      index: its index among them.
      unit: tokens; a query at n reads from `lookback` before the last multiple of `unit` on.
      lookback: tokens; see `unit`.
      sink_tokens: first tokens of a request that every query reads besides.
      states: whether its pages hold recurrent or opaque states, not a token in each slot.
    """

    name: str
    group: int
    layout: Layout
    index: int
    unit: int
    lookback: int
    sink_tokens: int
    states: bool


@pytree(Layout, Order, Part)
@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Layers whose pages have one shape, their places as data: `lax.scan` over it gives the body one layer at a time.

    Attributes:
      group: int32[L], as in `LayerPages`; `index`, `lookback`, `sink_tokens` too.
      number: int32[L], each one's place in `Serving.layers`.
      name: static; the layers' names, for errors.
      layout, unit, states: static; those of all.
    """

    group: jax.Array
    index: jax.Array
    lookback: jax.Array
    sink_tokens: jax.Array
    number: jax.Array
    name: str = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    unit: int = dataclasses.field(metadata={"static": True})
    states: bool = dataclasses.field(metadata={"static": True})


def stacked(layers: Sequence[LayerPages], numbers: Sequence[int]) -> LayerStack:
    """Layers as data.

    Args:
      layers: at least one.
      numbers: each one's place in `Serving.layers`.

    Raises:
      OperationError: two whose pages differ in more than the number of layers beside them, or of which one alone reads
        in chunks; chunks with a lookback.
    """
    widest = max((layer.layout for layer in layers), key=lambda layout: layout.shape[0])

    def alike(layer: LayerPages) -> tuple[object, ...]:
        shape = (widest.shape[0], *layer.layout.shape[1:])
        return dataclasses.replace(layer.layout, shape=shape), layer.unit, layer.states

    for layer in layers:
        in_chunks = layer.unit > 1 and layer.lookback and not layer.states
        if in_chunks or alike(layer) != (widest, layers[0].unit, layers[0].states):
            expected = f"pages and chunks as those of {layers[0].name}: others are a stack of their own"
            raise OperationError("layers", layer.name, expected)
    columns = [[getattr(layer, name) for layer in layers] for name in ("group", "index", "lookback", "sink_tokens")]
    arrays = [jnp.asarray(column, jnp.int32) for column in (*columns, numbers)]
    names = "one of " + ", ".join(layer.name for layer in layers)
    return LayerStack(*arrays, name=names, layout=widest, unit=layers[0].unit, states=layers[0].states)


def placed(
    config: VllmConfig, layouts: Mapping[str, tuple[Layout, int]], groups: Mapping[str, int]
) -> tuple[LayerPages, ...]:
    """The layers of a configuration.

    Args:
      config: the configuration.
      layouts: layout of each layer, and its index there.
      groups: group of each layer.
    """
    fields = np.asarray(of_config(config, len(config.topology.specs) + 1).groups)
    for name, group in groups.items():
        if fields[group, GroupField.HALVINGS]:
            raise ConfigError(
                f"layers[{name!r}]", config.topology.specs[group].kind, "a lookback that no length changes"
            )
    return tuple(
        LayerPages(
            name=name,
            group=groups[name],
            layout=layout,
            index=index,
            unit=max(1, int(fields[groups[name], GroupField.UNIT])),
            lookback=int(fields[groups[name], GroupField.LOOKBACK]),
            sink_tokens=config.topology.specs[groups[name]].sinks,
            states=bool(fields[groups[name], GroupField.STATES]),
        )
        for name, (layout, index) in layouts.items()
    )


def overlaid(config: VllmConfig, order: str) -> tuple[dict[str, tuple[Layout, int]], dict[str, int], int]:
    """Layouts for every group's layers over one pool, as vLLM overlays them: a block belongs to one group at a time.

    Args:
      config: the configuration; its groups name their layers.
      order: physical order of the axes, one that keeps a page together.

    Returns:
      Layout and index of each layer, its group, and the bytes of the pool.

    Raises:
      ConfigError: a group that names no layers.
      LayoutError: pages that cannot lie so.
    """
    layouts: dict[str, tuple[Layout, int]] = {}
    numbers: dict[str, int] = {}
    alone = [Layout.of_spec(spec, order, num_blocks=1) for spec in config.topology.specs]
    page = -(-max(layout.page_size for layout in alone) // 16) * 16
    for number, group in enumerate(config.topology.groups):
        if not group.layers:
            raise ConfigError(f"groups[{number}].layers", [], "the names of its layers")
        layout = Layout.of_spec(
            group.spec,
            order,
            num_blocks=config.num_blocks,
            num_layers=len(group.layers),
            layer_stride=config.num_blocks * page,
            block_stride=page,
        )
        for index, name in enumerate(group.layers):
            layouts[name], numbers[name] = (layout, index), number
    most = max(len(group.layers) for group in config.topology.groups)
    return layouts, numbers, most * config.num_blocks * page


def state_unit(config: VllmConfig) -> int:
    """Tokens at whose multiples every recurrent group can keep a state for others; 1 where none does."""
    kept = [
        config.block_size(group)
        for group, spec in enumerate(config.topology.specs)
        if config.caching and spec.keeps_states and spec.prefix_cacheable
    ]
    return math.lcm(*kept)


# Copies of blocks that a step asks for, made in the pages of all layers.


LANES = 4
"""Copies that are made side by side."""


def copied(pool: jax.Array, layers: Sequence[LayerPages], copies: jax.Array) -> jax.Array:
    """The pool with every block copied in all layers of its group, in time of the copies that there are.

    Args:
      pool: uint32[words].
      layers: every layer's place.
      copies: int32[Q, G, 2], of `hkv.cache.state.StepResult`: no block is a source and a target.
    """
    for group, layout in dict.fromkeys((layer.group, layer.layout) for layer in layers):
        pool = _copied(pool, layout, copies[:, group])
    return pool


def _copied(pool: jax.Array, layout: Layout, pairs: jax.Array) -> jax.Array:
    """The pool with the blocks of `pairs` int32[Q, 2] copied in all layers of a layout."""
    due = pairs[:, 0] >= 0
    turn = running_sum(due)
    lanes = -(-pairs.shape[0] // LANES) * LANES
    place = jnp.where(due, turn - 1, lanes)
    packed = jnp.full_like(pairs, PAD, shape=(lanes, 2)).at[place].set(pairs, mode="drop")

    def some(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, pages = carry
        now = lax.dynamic_slice_in_dim(packed, first, LANES)
        pages, _ = paged.copy_blocks(pages, layout, now[:, 0], now[:, 1])
        return first + LANES, pages

    return lax.while_loop(lambda carry: carry[0] < turn[-1], some, (jnp.zeros_like(turn[-1]), pool))[1]
