"""The model's sizes, what each of its layers caches, and random weights."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.model.topology import Topology
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, Mamba, MLAAttention, SlidingWindow

Weights = dict[str, jax.Array]

KINDS = ("full", "window", "chunked", "mla", "delta")
"""Full attention, sliding window, chunked local, latent (MLA), and gated delta net with a short convolution."""

DELTA = "delta"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes. Frozen and hashable: a static argument.

    Attributes:
      layers: the kind of each layer.
      window: tokens that a sliding-window query reads, its own included.
      chunk: tokens of a chunk; a chunked query reads none before its own.
      heads, kv_heads, head: query heads, key and value heads, and elements of each; the latent of an MLA layer has as
        many elements as all its keys and values would.
      delta_heads, delta_head: heads of a recurrent layer, and elements of its keys and of its values.
      taps: inputs that a recurrent layer's convolution reads, its own included.
      vocabulary: tokens.
      longest: most tokens of a request.
      block: tokens in a block.
      blocks: kinds with blocks of another size, and that.
      exact: whether no bit depends on how many tokens are computed together (`arithmetic`).
    """

    layers: tuple[str, ...] = (*KINDS, "window", "chunked", "delta")
    window: int = 8
    chunk: int = 8
    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    delta_heads: int = 2
    delta_head: int = 8
    taps: int = 3
    vocabulary: int = 64
    longest: int = 96
    block: int = 4
    blocks: tuple[tuple[str, int], ...] = ()
    exact: bool = False

    @property
    def width(self) -> int:
        """Elements of a token's vector."""
        return self.heads * self.head

    @property
    def latent(self) -> int:
        """Elements of an MLA layer's cell, the rotary part (as many as a head has) last."""
        return 2 * self.kv_heads * self.head

    @property
    def channels(self) -> int:
        """Elements of a recurrent layer's query, key and value together, which the convolution mixes in time."""
        return 3 * self.delta_heads * self.delta_head

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds there are, each a group of the cache, in order."""
        return tuple(kind for kind in KINDS if kind in self.layers)

    def group(self, kind: str) -> int:
        """The group of a kind's layers."""
        return self.kinds.index(kind)

    def slot(self, layer: int) -> int:
        """Index of a layer in its group."""
        return self.layers[:layer].count(self.layers[layer])

    @property
    def slots(self) -> int:
        """Most layers of one kind: pages of a block."""
        return max(self.layers.count(kind) for kind in self.kinds)

    def block_of(self, kind: str) -> int:
        """Tokens in a block of a kind's group; of a recurrent one, between two snapshots."""
        return dict(self.blocks).get(kind, self.block)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Cache description of a layer of each group; pages are padded to the largest."""
        bare = [self._spec(kind) for kind in self.kinds]
        page = max(spec.page_size_bytes for spec in bare)
        padded = [{} if spec.page_size_bytes == page else {"page_size_padded": page} for spec in bare]
        return tuple(dataclasses.replace(spec, **changes) for spec, changes in zip(bare, padded, strict=True))

    def _spec(self, kind: str) -> LayerSpec:
        size = self.block_of(kind)
        if kind == DELTA:
            state = (self.delta_heads, self.delta_head, self.delta_head)
            shapes = ((self.taps - 1, self.channels), state)
            return Mamba(block_size=size, shapes=shapes, dtypes=("float32", "float32"))
        if kind == "mla":
            return MLAAttention(block_size=size, num_kv_heads=1, head_size=self.latent, dtype="float32")
        heads = {"num_kv_heads": self.kv_heads, "head_size": self.head, "dtype": "float32"}
        if kind == "window":
            return SlidingWindow(block_size=size, window=self.window, **heads)
        if kind == "chunked":
            return ChunkedLocal(block_size=size, chunk=self.chunk, **heads)
        return FullAttention(block_size=size, **heads)

    def config(self, num_blocks: int) -> VllmConfig:
        """The cache's configuration: a group of each kind, all in one pool."""
        sizes = [self.block_of(kind) for kind in self.kinds]
        return VllmConfig(
            topology=Topology.of_specs(list(self.specs)),
            num_blocks=num_blocks,
            hash_block_size=math.gcd(*sizes),
            scheduler_block_size=math.lcm(*sizes),
            max_model_len=self.longest,
        )

    def layouts(self, num_blocks: int, order: str, kernel_block: int | None) -> dict[str, Layout]:
        """Layouts of the pages of each kind in the one pool. Page i of a block is that of its group's i-th layer.

        Args:
          num_blocks: blocks in the pool.
          order: of the axes, as `hkv.layout.orders.Order` names them; where kinds share the pool, one that keeps a page
            together.
          kernel_block: tokens of the blocks that kernels see, None for the cache's own. Recurrent states are
            never split.

        Raises:
          LayoutError: an order that scatters a page, or padded pages that are to be split.
        """
        found = {}
        for kind, spec in zip(self.kinds, self.specs, strict=True):
            split = None if kind == DELTA else kernel_block
            sizes = {"num_blocks": num_blocks, "num_layers": self.slots}
            found[kind] = Layout.of_spec(spec, order, kernel_block_size=split, **sizes)
            if len(self.kinds) > 1 and len(found[kind].block_runs(0, 0)) > 1:
                raise LayoutError("order", order, f"one that keeps a page of {kind} together: kinds share the pool")
        return found


def weights_of(model: Model, seed: int) -> list[Weights]:
    """Random weights, a dict a layer; the first also has the embedding, and the cosines and sines of all positions."""
    keys = iter(jax.random.split(jax.random.key(seed), 12 * len(model.layers) + 1))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32) / np.sqrt(shape[-2])

    layers: list[Weights] = []
    for kind in model.layers:
        layer = {name: matrix(*shape) for name, shape in _shapes(model, kind).items()}
        layer |= {"up": matrix(model.width, 2 * model.width), "down": matrix(2 * model.width, model.width)}
        layers.append(layer)
    angle = np.arange(model.longest)[:, None] / 100 ** (np.arange(model.head // 2) / (model.head // 2))
    turn = {"cos": np.cos(angle), "sin": np.sin(angle)}
    layers[0] |= {name: jnp.asarray(value, jnp.float32) for name, value in turn.items()}
    layers[0]["embedding"] = jax.random.normal(next(keys), (model.vocabulary, model.width), jnp.float32)
    return layers


def _shapes(model: Model, kind: str) -> dict[str, tuple[int, ...]]:
    width, head = model.width, model.head
    if kind == DELTA:
        inner = model.delta_heads * model.delta_head
        gates = {"decay": (width, model.delta_heads), "rate": (width, model.delta_heads), "gate": (width, inner)}
        return {"mixed": (width, model.channels), "taps": (model.taps, model.channels), "out": (inner, width), **gates}
    if kind == "mla":
        rank = model.latent - head
        return {
            "query": (width, model.heads * 2 * head),
            "latent": (width, model.latent),
            "key": (model.heads, head, rank),
            "value": (model.heads, rank, head),
            "out": (width, width),
        }
    kv = model.kv_heads * head
    return {"query": (width, width), "key": (width, kv), "value": (width, kv), "out": (width, width)}
