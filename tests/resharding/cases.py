"""Pairs of parallel shapes and layouts, and requests that move between them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import strategies as st

from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.mesh.parallel_shape import ParallelShape
from hkv.mesh.resharding import Side
from hkv.spec import AttentionSpec, FullAttention, LayerSpec, Mamba, MLAAttention

BLOCKS = 6
LAYERS = 2


def side(
    spec: LayerSpec, shape: ParallelShape, order: str, row: Sequence[int], block_size: int, kernel: int | None = None
) -> Side:
    """One rank's layout of a spec of all heads."""
    changes: dict[str, int] = {"block_size": block_size}
    if isinstance(spec, AttentionSpec):
        changes["num_kv_heads"] = shape.heads_per_rank
    local = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
    if isinstance(local, AttentionSpec):
        local = quantize(dataclasses.replace(local, quantization="none"), spec.quantization)  # type: ignore[union-attr]
    layout = Layout.of_spec(local, order, num_blocks=BLOCKS, num_layers=LAYERS, kernel_block_size=kernel)
    return Side(shape=shape, layout=layout, row=tuple(row))


@dataclasses.dataclass(frozen=True)
class Case:
    """A request that moves; `positions` are what the target lacks."""

    source: Side
    target: Side
    positions: range

    @property
    def states(self) -> tuple[int, int]:
        """The states of those positions, first and stop, by the definition of a state."""
        per = self.source.layout.tokens_per_state
        if per is None or not self.positions:
            return self.positions.start, self.positions.stop
        return math.floor(self.positions.start / Fraction(per)), math.ceil(self.positions.stop / Fraction(per))


@st.composite
def shapes(draw: st.DrawFn, heads: int) -> ParallelShape:
    """Any degrees up to four of each."""
    tensor = draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0 or n % heads == 0]))
    context = draw(st.sampled_from([1, 1, 2, 3, 4]))
    interleave = draw(st.sampled_from([1, 2, 4, None]))
    return ParallelShape(heads=heads, tensor=tensor, context=context, interleave=interleave)


@st.composite
def specs(draw: st.DrawFn, heads: int) -> LayerSpec:
    """Attention in several packings, latents, compressed states, snapshots."""
    kind = draw(
        st.sampled_from(["plain", "plain", "scales", "kv_planes", "latent", "indexer", "compressed", "several"])
    )
    base = FullAttention(block_size=4, num_kv_heads=heads, head_size=2, head_size_v=1, dtype="bfloat16")
    if kind == "scales":
        return dataclasses.replace(base, head_size=4, head_size_v=4, quantization="int8_per_token_head")
    if kind == "kv_planes":
        return dataclasses.replace(base, head_size_v=None, quantization=kind)
    if kind == "compressed":
        return dataclasses.replace(base, tokens_per_state=2)
    if kind == "several":
        return dataclasses.replace(base, tokens_per_state=Fraction(1, 2))
    if heads == 1 and kind == "latent":
        return MLAAttention(block_size=4, head_size=6)
    if heads == 1 and kind == "indexer":
        return MLAAttention(block_size=4, head_size=128, dtype="uint8", quantization="fp8_indexer")
    if kind == "latent":
        return Mamba(block_size=4, shapes=((2,), (4,)), dtypes=("float32", "bfloat16"))
    return base


def tokens_of(chosen: Side) -> int:
    """Positions that a row holds."""
    per = chosen.layout.tokens_per_state
    if per is None:
        return len(chosen.row)
    return int(len(chosen.row) * chosen.shape.virtual_states(chosen.layout) * Fraction(per))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Both sides drawn apart; sometimes a part of the request is there already."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    spec = draw(specs(heads))
    source_shape, target_shape = draw(shapes(heads)), draw(shapes(heads))
    if spec.snapshot:  # each rank's state is its own: as many on both sides
        tensor = source_shape.tensor
        source_shape, target_shape = (
            ParallelShape(heads=tensor, tensor=tensor, context=shape.context, interleave=None)
            for shape in (source_shape, target_shape)
        )
    sides = [draw(sides_of(spec, shape)) for shape in (source_shape, target_shape)]
    longest = min(map(tokens_of, sides))
    start = draw(st.integers(0, longest))
    return Case(sides[0], sides[1], range(start, draw(st.integers(start, min(longest, start + 24)))))


@st.composite
def sides_of(draw: st.DrawFn, spec: LayerSpec, shape: ParallelShape) -> Side:
    if shape.interleave == 1 and getattr(spec, "tokens_per_state", 1) == 2:
        shape = dataclasses.replace(shape, interleave=2)  # a state is not cut
    order = draw(st.sampled_from([order.value for order in Order]))
    blocks = draw(st.lists(st.integers(1, BLOCKS - 1), min_size=1, max_size=3, unique=True))
    size = draw(st.sampled_from([4, 8]))
    kernel = None
    if not spec.snapshot and order in ("LBNHC", "LBHNC") and draw(st.booleans()):
        kernel = 4
    return side(spec, shape, order, blocks, size, kernel)


def content(part: str, layer: int, head: int, state: int, rank: object, nbytes: int) -> bytes:
    """Bytes that a cold run computes: the same on whichever rank."""
    del rank
    found = hashlib.blake2b(f"{part} {layer} {head} {state}".encode()).digest()
    return (found * (nbytes // len(found) + 1))[:nbytes]


TAG = struct.Struct("<IIHHBB2x")
"""Prefix, position, layer, head, tensor and context rank: what a shadow tag says of the slot that carries it."""
