"""Small described models and servers, drawn, of every kind of layer that RTP-LLM has."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import DescribedModel, RtpOptions
from hkv.dialects.rtp_llm.planning.sizes import OpaqueRegion
from hkv.model.group_policy import DEFAULT_TAG, CacheDescription, CpSlice, GroupType, LayerDescription
from hkv.spec import FullAttention, LayerSpec, Mamba, MLAAttention

SIZE = 8
"""Tokens of a block."""

LATENT, LATENT_FLOAT8 = (6, 2), (128, 4)
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")


def one(tag: str, spec: LayerSpec, **policy: Any) -> LayerDescription:
    """A layer of one cache."""
    return LayerDescription(caches=(CacheDescription(tag=tag, spec=spec, **policy),))


def attention(heads: int, size: int, dtype: str) -> FullAttention:
    return FullAttention(block_size=SIZE, num_kv_heads=heads, head_size=size, dtype=dtype)


def recurrent(dtype: str = "bfloat16", heads: int = 2) -> Mamba:
    """A gated delta net of heads of 2 elements."""
    shapes = ((2, 2 * 2 * heads + 2 * heads), (heads, 2, 2))
    return Mamba(block_size=SIZE, shapes=shapes, dtypes=("bfloat16", dtype))


def region(**fields: Any) -> OpaqueRegion:
    sized = {"block_size": 256, "state": False, "entry_elems": 5, "entry_dtype": "uint8", "count": "compressed"}
    return OpaqueRegion(**{**sized, "ratio": 64, **fields})


def window(name: str, **fields: Any) -> CacheDescription:
    """A ring of 4 entries that prefill ranks share."""
    ring = {"state": True, "count": "ring", "ratio": 4, "cp_scale_seq": True, "cp_align_payload": True}
    spec = region(**{**ring, **fields})
    cut = {"none": CpSlice.NONE, "payload": CpSlice.PAYLOAD_BYTES, "stride": CpSlice.EQUAL_BYTES}[spec.cp_slice]
    return CacheDescription(tag=name, spec=spec, state_cache=True, cp_slice=cut)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a server."""

    model: DescribedModel
    options: RtpOptions
    draft: DescribedModel | None = None
    num_blocks: int = 3

    @property
    def cache(self) -> PlannedCache:
        return PlannedCache.of_layers(self.model, self.options, num_blocks=self.num_blocks, draft=self.draft)


@st.composite
def single(draw: st.DrawFn) -> Case:
    """Attention or latents in one pool, with draft modules like them."""
    kernel = draw(st.sampled_from([0, 2, 4]))
    count, modules = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    if draw(st.booleans()):
        heads, dtype = draw(st.sampled_from([1, 2, 4, 12])), draw(st.sampled_from(DTYPES))
        spec: LayerSpec = attention(heads, draw(st.sampled_from([2, 4])), dtype)
        sizes, indexer = None, None
    else:
        dtype = draw(st.sampled_from(["bfloat16", "float8_e4m3fn"]))
        sizes = LATENT_FLOAT8 if dtype.startswith("float8") else LATENT
        spec, indexer = (
            MLAAttention(block_size=SIZE, head_size=sum(sizes), dtype=dtype),
            draw(st.sampled_from([None, 4])),
        )
    model = DescribedModel((one(DEFAULT_TAG, spec),) * count, sizes, indexer)
    options = RtpOptions(
        block_size=SIZE, kernel_block_size=kernel, tensor_parallel=draw(st.sampled_from([1, 2, 8])), modules=modules
    )
    draft = DescribedModel((one(DEFAULT_TAG, spec),), sizes, indexer) if draw(st.booleans()) else None
    return Case(model, options, draft, draw(st.integers(2, 4)))


@st.composite
def hybrid(draw: st.DrawFn) -> Case:
    """Attention and recurrent states in one pool, states smaller than blocks."""
    dtype = draw(st.sampled_from(DTYPES))
    full, state = attention(2, 8, dtype), recurrent(draw(st.sampled_from(["bfloat16", "float32"])))
    order = draw(st.permutations(["full"] * 2 + ["linear0"] * draw(st.integers(1, 3)) + ["linear1"]))
    layers = tuple(one(tag, full if tag == "full" else state) for tag in order)
    options = RtpOptions(
        block_size=SIZE,
        kernel_block_size=draw(st.sampled_from([0, 4])),
        tensor_parallel=draw(st.sampled_from([1, 2])),
        modules=draw(st.integers(1, 2)),
    )
    longest = max(order.count(tag) for tag in set(order))
    aligned = order.count("full") == longest
    draft = DescribedModel((one(DEFAULT_TAG, full),)) if aligned and draw(st.booleans()) else None
    return Case(DescribedModel(layers), options, draft, draw(st.integers(2, 4)))


@st.composite
def independent(draw: st.DrawFn) -> Case:
    """A pool a group: windows of attention, states, and opaque regions, several in a layer."""
    ranks = draw(st.sampled_from([1, 1, 2, 4]))
    role = draw(st.sampled_from(["prefill", "decode"])) if ranks > 1 else "both"
    kernel = draw(st.sampled_from([0, 128]))
    compressed = CacheDescription(tag="compressed", spec=region(alignment=draw(st.sampled_from([0, 8]))))
    elems, dtype = draw(st.sampled_from([(4, "float32"), (5, "uint8")]))
    payload = window("rings", entry_elems=elems, entry_dtype=dtype, cp_slice="payload")
    bytes_of = window("windows", entry_elems=4, cp_slice="stride", alignment=draw(st.sampled_from([0, 6])))
    fixed = dataclasses.replace(payload, tag="fixed", explicit_block_num=2, charge_to_paged_budget=True)
    choices = [(compressed,), (compressed, payload), (bytes_of, compressed), (fixed, bytes_of), (payload,)]
    others = [LayerDescription(caches=draw(st.sampled_from(choices))) for _ in range(draw(st.integers(0, 2)))]
    layers = draw(st.permutations([LayerDescription(caches=(compressed,)), *others]))  # rings alone have no plan
    options: dict[str, Any] = {"pools": "independent", "kernel_block_size": kernel, "role": role}
    if ranks == 1 and kernel == 0:
        swa = dataclasses.replace(attention(1, 2, "float8_e4m3fn"), block_size=256)
        layers.append(one("swa", swa, group_type=GroupType.SWA))
        layers.append(one("linear", dataclasses.replace(recurrent("float32"), block_size=256)))
    options |= {"ranks": ranks} if role == "prefill" else {"prefill_ranks": ranks if role == "decode" else 1}
    step = draw(st.sampled_from([1, 2]))
    return Case(
        DescribedModel(tuple(layers)), RtpOptions(**options, block_size=256, step=step), None, draw(st.integers(2, 5))
    )


@st.composite
def drafted_apart(draw: st.DrawFn) -> Case:
    """Attention with draft modules like it, in a pool of its own."""
    spec = attention(draw(st.sampled_from([1, 2])), 2, draw(st.sampled_from(DTYPES)))
    model, draft = (DescribedModel((one("full", spec),) * count) for count in (draw(st.integers(1, 3)), 1))
    options = RtpOptions(pools="independent", block_size=SIZE, modules=draw(st.integers(1, 2)))
    return Case(model, options, draft, draw(st.integers(2, 4)))


cases = st.one_of(single(), hybrid(), independent(), drafted_apart())
