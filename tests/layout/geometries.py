"""Hypothesis strategies for specs and layouts: sizes that all differ, and the coincidences that hide swapped axes."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from hypothesis import strategies as st

from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.spec import AttentionSpec, FullAttention, LayerSpec, Mamba, MLAAttention, OpaqueState, SlidingWindow

ORDERS = st.sampled_from(list(Order))
DTYPES = ("bfloat16", "float16", "float32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")

DISTINCT = {"num_layers": 5, "num_blocks": 7, "heads": 3, "states": 4, "head_size": 11, "head_size_v": 13}
"""Every size differs from every other, so that no swap of axes goes unseen."""

COINCIDENCES = (
    {"num_layers": 2, "num_blocks": 2, "heads": 2, "states": 2, "head_size": 2, "head_size_v": 2},
    {"num_layers": 1, "num_blocks": 2, "heads": 2, "states": 4, "head_size": 4, "head_size_v": 4},
    {"num_layers": 3, "num_blocks": 3, "heads": 1, "states": 3, "head_size": 3, "head_size_v": 3},
    {"num_layers": 2, "num_blocks": 1, "heads": 1, "states": 1, "head_size": 1, "head_size_v": 1},
    {"num_layers": 4, "num_blocks": 4, "heads": 4, "states": 4, "head_size": 4, "head_size_v": 4},
)
"""Sizes at which two axes look alike."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A spec and the arguments of `Layout.of_spec`."""

    spec: LayerSpec
    order: Order
    num_layers: int
    num_blocks: int
    layer_stride: int | None = None
    block_stride: int | None = None
    offset: int = 0
    kernel_block_size: int | None = None

    def layout(self) -> Layout:
        return Layout.of_spec(
            self.spec,
            self.order,
            num_blocks=self.num_blocks,
            num_layers=self.num_layers,
            layer_stride=self.layer_stride,
            block_stride=self.block_stride,
            offset=self.offset,
            kernel_block_size=self.kernel_block_size,
        )


def fixed_case(sizes: dict[str, int], order: Order, dtype: str = "float16", **changes: object) -> Case:
    """The case of one of the named size sets."""
    spec = FullAttention(
        block_size=sizes["states"],
        num_kv_heads=sizes["heads"],
        head_size=sizes["head_size"],
        head_size_v=sizes["head_size_v"],
        dtype=dtype,
    )
    return Case(spec, order, sizes["num_layers"], sizes["num_blocks"], **changes)  # type: ignore[arg-type]


@st.composite
def specs(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> LayerSpec:
    """Any kind of layer, small enough to enumerate."""
    kind = draw(
        st.sampled_from(["attention", "attention", "compressed", "several", "mla", "quantized", "mamba", "opaque"])
    )
    block_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    heads, head_size = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    if kind == "mamba":
        shapes = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
        kinds = draw(
            st.lists(st.sampled_from(["float32", "bfloat16", "uint8"]), min_size=len(shapes), max_size=len(shapes))
        )
        ordered = sorted(kinds, key=["float32", "bfloat16", "uint8"].index)
        return Mamba(block_size=block_size, shapes=tuple(shapes), dtypes=tuple(ordered))
    if kind == "opaque":
        return OpaqueState(block_size=block_size, entry_bytes=draw(st.integers(1, 9)))
    dtype = draw(st.sampled_from(dtypes))
    if kind == "mla":
        return MLAAttention(block_size=block_size, head_size=head_size, dtype=dtype)
    if kind == "quantized":
        return draw(quantized_specs(block_size))
    spec = SlidingWindow(
        block_size=block_size,
        window=draw(st.integers(1, 9)),
        num_kv_heads=heads,
        head_size=head_size,
        head_size_v=draw(st.none() | st.integers(0, 6)),
        dtype=dtype,
    )
    if kind == "compressed" and block_size % 2 == 0:
        return dataclasses.replace(spec, tokens_per_state=2)
    if kind == "several":
        return dataclasses.replace(spec, tokens_per_state=Fraction(1, draw(st.integers(2, 3))))
    return spec


@st.composite
def quantized_specs(draw: st.DrawFn, block_size: int) -> AttentionSpec:
    """Attention whose pages hold scales."""
    heads = draw(st.integers(1, 3))
    name = draw(
        st.sampled_from(
            [
                *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"),
                *("nvfp4", "kv_planes", "kv_halves", "rocm_pages"),
            ]
        )
    )
    size = 16 if name == "nvfp4" else 8
    return quantize(
        FullAttention(block_size=block_size, num_kv_heads=heads, head_size=size, dtype="float16"),
        name,
    )


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Case:
    """A legal layout: dense, padded, packed among other layers' pages, shifted or split."""
    spec = draw(specs(dtypes))
    order = draw(ORDERS)
    layers, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    planes = isinstance(spec, AttentionSpec) and spec.quantization in ("nvfp4", "kv_halves")
    if isinstance(spec, AttentionSpec) and spec.quantization == "rocm_pages":
        order = draw(st.sampled_from([each for each in Order if each is not Order.LBNHC and each is not Order.BLNHC]))
    elif planes and spec.num_heads > 1:
        order = draw(st.sampled_from([Order.LBHNC, Order.BLHNC]))
    form = draw(st.sampled_from(["dense", "padded", "packed", "split"]))
    offset = draw(st.integers(0, 3)) * 16
    case = Case(spec, order, layers, blocks, offset=offset)
    if form == "padded" and (order.block_compact or spec.num_heads == 1):
        padded = -(-(spec.page_size_bytes + draw(st.integers(0, 24))) // 8) * 8
        return dataclasses.replace(case, spec=dataclasses.replace(spec, page_size_padded=padded))  # type: ignore[call-arg]
    if form == "packed" and order.block_compact and order.block_outermost:
        before, after = draw(st.integers(0, 3)) * 8, draw(st.integers(0, 3)) * 8
        stride = -(-(before + layers * spec.page_size_bytes + after) // 8) * 8
        return dataclasses.replace(case, offset=offset + before, block_stride=stride)
    if form == "split" and not spec.snapshot and (order in (Order.LBHNC, Order.LBNHC) or layers == 1):
        if not order.block_compact and spec.num_heads > 1:
            return case
        sizes = [k for k in range(1, spec.block_size) if spec.block_size % k == 0]
        sizes = [k for k in sizes if spec.states_in(k) * (spec.block_size // k) == spec.num_states]
        if sizes:
            return dataclasses.replace(case, kernel_block_size=draw(st.sampled_from(sizes)))
    return case
