"""Shapes and layouts of small sharded caches, and random content for them."""

from __future__ import annotations

import dataclasses

import numpy as np

from hkv.layout.block_layout import Layout
from hkv.layout.content import quantize
from hkv.layout.views.numpy import numpy_dtype
from hkv.mesh.parallel_shape import ParallelShape
from hkv.spec import AttentionSpec, FullAttention, MLAAttention
from reference.sharding import RankIndex, spread

BLOCKS, LAYERS = 5, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A sharded cache, by the `layout` of one rank, and the same on one device: every head, virtual blocks."""

    shape: ParallelShape
    layout: Layout
    whole: Layout

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's pool, some of them behind the cache."""
        return self.layout.end + 16

    def random_pools(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes `[data, whole]`, and the same spread over `[data, tensor, context, bytes]`; padding is random too."""
        generator = np.random.default_rng(seed)
        shape = (self.shape.data, self.shape.tensor, self.shape.context, self.rank_bytes)
        whole = generator.integers(0, 256, (self.shape.data, self.whole.end), np.uint8)
        pools = generator.integers(0, 256, shape, np.uint8)
        self.spread(whole, pools)
        return whole, pools

    def spread(self, whole: np.ndarray, pools: np.ndarray) -> None:
        """Every element of each replica's pool to the ranks that hold it."""
        for data, pool in enumerate(whole):
            ranks: dict[RankIndex, np.ndarray] = {rank: pools[data][rank] for rank in np.ndindex(pools.shape[1:3])}
            spread(pool, self.whole, self.shape, self.layout, ranks)

    def random_values(self, count: int, seed: int) -> dict[str, np.ndarray]:
        """Every part `[data, count, heads, ...]`, NaN payloads among them."""
        generator, found = np.random.default_rng(seed), {}
        for part in self.whole.content:
            heads = self.whole.shape[2] if part.heads is None else part.heads
            dtype = numpy_dtype(part.dtype)
            shape = (self.shape.data, count, heads, *part.shape[:-1], part.shape[-1] * dtype.itemsize)
            found[part.name] = generator.integers(0, 256, shape, np.uint8).view(dtype)
        return found


def make_case(
    shape: ParallelShape,
    order: str = "LBNHC",
    *,
    block_size: int = 4,
    kernel: int | None = None,
    packing: str = "none",
    layers: int = LAYERS,
    spec: AttentionSpec | None = None,
) -> Case:
    """The case of a spec of all heads, by default attention whose sizes all differ."""
    if spec is None:
        size = {"nvfp4": 16, "none": 3}.get(packing, 8)
        other = 2 if packing == "none" else size
        spec = FullAttention(block_size=block_size, num_kv_heads=shape.heads, head_size=size, head_size_v=other)

    def layout(heads: int, tokens: int, split: int | None) -> Layout:
        changed = quantize(dataclasses.replace(spec, num_kv_heads=heads, block_size=tokens), packing)
        return Layout.of_spec(changed, order, num_blocks=BLOCKS, num_layers=layers, kernel_block_size=split)

    whole = layout(shape.heads, spec.block_size * shape.token_ranks, None)
    return Case(shape, layout(shape.heads_per_rank, spec.block_size, kernel), whole)


def latent(shape: ParallelShape, packing: str, order: str = "LBNHC") -> Case:
    """A latent of one head."""
    size, dtype = (128, "uint8") if packing == "fp8_indexer" else (576, "bfloat16")
    return make_case(shape, order, spec=MLAAttention(block_size=4, head_size=size, dtype=dtype), packing=packing)
