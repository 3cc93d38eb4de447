"""Content of a page: keys, values, latents, scales and states, and the place of each of them.

A part lies either in the cell of its (head, state), between the other parts of that cell, or in a plane of its own: all
keys of a page first, all scales after them. Names of packings are the engine's cache dtypes.
"""

from __future__ import annotations

import dataclasses
import math

from hkv.errors import LayoutError
from hkv.layout.strided import dense_strides
from hkv.spec import AttentionSpec, LayerSpec, attention_of
from hkv.spec.dtypes import item_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of element in a page.

    Attributes:
      name: `key`, `value`, `latent`, `rope`, `key_scale`, `state0`, ...
      dtype: element type; packed 4-bit values count as uint8.
      shape: elements of one (head, state).
      offset: first byte, counted from the cell, or from the page if `strides` is given.
      first_head: head slot of the part's head 0; only for parts in cells.
      heads: heads of the part, None for every head slot.
      strides: (head, state) strides inside the page in bytes for a part in a plane, None for a part in cells.
      steps: bytes between neighbours along each axis of `shape`, None for a dense one. A part that has them lies in one
        head slot, `first_head`, whatever its heads.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    first_head: int = 0
    heads: int | None = None
    strides: tuple[int, int] | None = None
    steps: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one (head, state)."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each axis of `shape`."""
        return self.steps or dense_strides(self.shape, item_bytes(self.dtype))


QUANTIZATIONS = {
    "none": "elements of the spec's dtype",
    "fp8_per_tensor": "one-byte elements; the scale is the layer's, not the cache's",
    "int8_per_token_head": "int8 and a float32 scale for each token, head and side",
    "fp8_per_token_head": "float8_e4m3fn and a float32 scale for each token, head and side",
    "int4_per_token_head": "two 4-bit values a byte and a float32 scale for each token, head and side",
    "nvfp4": "4-bit values and float8_e4m3fn scales of 16 each, in planes; K and V in separate head slots",
    "fp8_ds_mla": "DeepSeek V3.2: 512 float8, 4 float32 scales, 64 bfloat16 of RoPE; 656 bytes",
    "nvfp4_ds_mla": "DeepSeek V3.2: 512 4-bit values, 64 float8 of RoPE, 32 float8 scales; 352 bytes",
    "fp8_ds_mla_v4": "DeepSeek V4: rows of 448 float8 and 64 bfloat16 of RoPE, then rows of 7 scales; 584 bytes",
    "mxfp8_ds_mla_v41": "DeepSeek V4.1: 512 float8, 16 power-of-two scales; 528 bytes",
    "fp8_indexer": "sparse indexer: all float8 keys of a page, then one float32 scale per 128 of each key; 132 bytes",
    "kv_planes": "head slot 0 holds every head's K, head slot 1 every head's V (ROCm attention, b12x)",
    "rocm_pages": "head slot 0 holds K in vectors of 16 bytes, tokens between them; head slot 1 V, tokens innermost",
    "kv_halves": "the first half of each head's run is K of every token, the second half V (CPU attention)",
}
"""Packings this module can take apart, with one line about each."""

_PER_TOKEN_HEAD = {
    "int8_per_token_head": ("int8", 1),
    "fp8_per_token_head": ("float8_e4m3fn", 1),
    "int4_per_token_head": ("uint8", 2),
}

_DS_MLA = {
    "fp8_ds_mla": (("latent", "float8_e4m3fn", 512), ("scale", "float32", 4), ("rope", "bfloat16", 64)),
    "nvfp4_ds_mla": (("latent", "uint8", 256), ("rope", "float8_e4m3fn", 64), ("scale", "float8_e4m3fn", 32)),
    "mxfp8_ds_mla_v41": (("latent", "float8_e4m3fn", 512), ("scale", "float8_e8m0fnu", 16)),
}


def quantize(spec: AttentionSpec, name: str) -> AttentionSpec:
    """`spec` with the head slots and content bytes of a packing (vLLM 0.33 `customize_spec` of its backends).

    A layer that already states its content bytes is unchanged. LayoutError for an unknown name of a packing, or head
    sizes that it does not take.
    """
    if name not in QUANTIZATIONS:
        raise LayoutError("quantization", name, f"one of {', '.join(QUANTIZATIONS)}")
    if spec.state_content_bytes is not None:
        return spec
    changes: dict[str, object] = {"quantization": name}
    if name in _PER_TOKEN_HEAD:
        changes["dtype"], values = _PER_TOKEN_HEAD[name]
        if spec.head_size % values or spec.value_size % values:
            raise LayoutError("head_size", spec.head_size, f"a multiple of {values} for {name}")
        changes["state_content_bytes"] = (spec.head_size + spec.value_size) // values + 8
    elif name == "nvfp4":
        if spec.head_size % 16 or spec.head_size != spec.value_size:
            raise LayoutError("head_size", spec.head_size, "a multiple of 16, the same for K and V, for nvfp4")
        changes |= {
            "dtype": "uint8",
            "num_head_slots": 2 * spec.num_kv_heads,
            "state_content_bytes": spec.head_size // 2 + spec.head_size // 16,
        }
    elif name in _DS_MLA:
        size = sum(count * item_bytes(dtype) for _, dtype, count in _DS_MLA[name])
        changes |= {"dtype": "uint8", "state_content_bytes": size}
    elif name == "fp8_ds_mla_v4":
        changes |= {"dtype": "uint8", "state_content_bytes": 584}
    elif name == "fp8_indexer":
        if spec.head_size % 128:
            raise LayoutError("head_size", spec.head_size, "a multiple of 128, the elements that share a scale")
        changes |= {"dtype": "uint8", "state_content_bytes": spec.head_size // 128 * 132}
    elif name in ("kv_planes", "rocm_pages"):
        if spec.head_size != spec.value_size:
            raise LayoutError("head_size_v", spec.value_size, f"{spec.head_size}, as K and V have a plane each")
        if name == "rocm_pages" and spec.head_size * item_bytes(spec.dtype) % VECTOR_BYTES:
            elements = VECTOR_BYTES // item_bytes(spec.dtype)
            expected = f"a multiple of {elements}, the {spec.dtype} elements of {VECTOR_BYTES} bytes"
            raise LayoutError("head_size", spec.head_size, expected)
        content = spec.num_kv_heads * spec.head_size * item_bytes(spec.dtype)
        changes |= {"num_head_slots": 2, "state_content_bytes": content}
    elif name == "fp8_per_tensor":
        changes["dtype"] = spec.dtype if item_bytes(spec.dtype) == 1 else "float8_e4m3fn"
    return dataclasses.replace(spec, **changes)  # pyright: ignore[reportArgumentType]


def content_parts(spec: LayerSpec, states: int) -> tuple[Part, ...]:
    """The parts of a page of `states` states, which a kernel sees: a piece of the manager's block when that is split.

    A packing of which only the size is known, or whose size is not what its name says, is one part named `packed`.
    """
    if (attention := attention_of(spec)) is None:
        return _other_parts(spec)
    parts = _planes(attention, states) or _cell_parts(_fields(attention))
    if any(part.strides is not None for part in parts) or parts[-1].offset + parts[-1].nbytes == spec.content_bytes:
        return parts
    return (Part(name="packed", dtype="uint8", shape=(spec.content_bytes,), offset=0),)


def packing(spec: AttentionSpec) -> str:
    """The name of the packing of a layer's cells: its quantization, or what its cache dtype and size say."""
    name = spec.quantization if spec.quantization != "none" else getattr(spec, "cache_dtype", None) or "none"
    if getattr(spec, "cache_role", None) == "indexer" and spec.content_bytes % 132 == 0:
        return "fp8_indexer"
    if name == "fp8_ds_mla":
        return {584: "fp8_ds_mla_v4", 528: "mxfp8_ds_mla_v41"}.get(spec.content_bytes, name)
    return name


def _fields(spec: AttentionSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the parts that share a cell, in memory order."""
    name = packing(spec)
    if name in _DS_MLA:
        return [(part, dtype, (count,)) for part, dtype, count in _DS_MLA[name]]
    if name in _PER_TOKEN_HEAD:
        dtype, values = _PER_TOKEN_HEAD[name]
        if not spec.value_size:
            return [("latent", dtype, (spec.head_size // values,)), ("scale", "float32", (2,))]
        key = [("key", dtype, (spec.head_size // values,)), ("key_scale", "float32", (1,))]
        return [*key, ("value", dtype, (spec.value_size // values,)), ("value_scale", "float32", (1,))]
    if not spec.value_size:
        return [("latent", spec.dtype, (spec.head_size,))]
    return [("key", spec.dtype, (spec.head_size,)), ("value", spec.dtype, (spec.value_size,))]


def _planes(spec: AttentionSpec, states: int) -> tuple[Part, ...]:
    """The parts of packings that do not lie side by side in a cell; empty for all others."""
    name, content = packing(spec), spec.content_bytes
    if name == "fp8_ds_mla_v4" and content == 584:
        rows = [("latent", "float8_e4m3fn", (448,)), ("rope", "bfloat16", (64,))]
        return (*_cell_parts(rows, strides=(states * 584, 576)), _plane("scale", "float8_e8m0fnu", 7, 8, states, 576))
    if name == "fp8_indexer" and content % 132 == 0:
        keys = content // 132 * 128
        key = _plane("key", "float8_e4m3fn", keys, keys, states, 0)
        return (key, _plane("key_scale", "float32", keys // 128, keys // 32, states, keys))
    heads, item = spec.num_kv_heads, item_bytes(spec.dtype)
    if name == "nvfp4" and spec.num_heads == 2 * heads and content == spec.head_size // 2 + spec.head_size // 16:
        return _nvfp4_parts(spec, states)
    if name == "rocm_pages" and spec.num_heads == 2 and content == heads * spec.head_size * item:
        return _rocm_parts(spec, states)
    if name == "kv_planes" and spec.num_heads == 2 and content == heads * spec.head_size * item:
        key = Part(name="key", dtype=spec.dtype, shape=(heads, spec.head_size), offset=0, first_head=0, heads=1)
        return (key, dataclasses.replace(key, name="value", first_head=1))
    if name == "kv_halves" and content == (spec.head_size + spec.value_size) * item:
        return _halves(spec, states)
    return ()


def _other_parts(spec: LayerSpec) -> tuple[Part, ...]:
    """A recurrent layer's states back to back (vLLM 0.33 `MambaSpec`), or one opaque entry."""
    shapes, dtypes = getattr(spec, "shapes", None), getattr(spec, "dtypes", None)
    if shapes is None or dtypes is None:
        return (Part(name="entry", dtype="uint8", shape=(spec.content_bytes,), offset=0),)
    states = enumerate(zip(shapes, dtypes, strict=True))
    return _cell_parts([(f"state{index}", dtype, tuple(shape)) for index, (shape, dtype) in states])


def _cell_parts(
    fields: list[tuple[str, str, tuple[int, ...]]], strides: tuple[int, int] | None = None
) -> tuple[Part, ...]:
    parts: list[Part] = []
    offset = 0
    for name, dtype, shape in fields:
        parts.append(Part(name=name, dtype=dtype, shape=shape, offset=offset, strides=strides))
        offset += parts[-1].nbytes
    return tuple(parts)


def _plane(name: str, dtype: str, count: int, row: int, states: int, before: int) -> Part:
    """A plane of `row` bytes a state, behind planes that take `before` bytes a state; the page has one head."""
    return Part(name=name, dtype=dtype, shape=(count,), offset=before * states, strides=(row * states, row))


def _nvfp4_parts(spec: AttentionSpec, states: int) -> tuple[Part, ...]:
    """Parts of K and of V: the data of all heads, then their scales (vLLM 0.33 `nvfp4_split_data_scale`)."""
    data, scale = spec.head_size // 2, spec.head_size // 16
    heads = spec.num_kv_heads
    parts: list[Part] = []
    for side, name in enumerate(("key", "value")):
        start = side * heads * states * (data + scale)
        for suffix, dtype, row, before in (("", "uint8", data, 0), ("_scale", "float8_e4m3fn", scale, data)):
            offset = start + before * heads * states
            strides = (row * states, row)
            parts.append(
                Part(name=name + suffix, dtype=dtype, shape=(row,), offset=offset, heads=heads, strides=strides)
            )
    return tuple(parts)


VECTOR_BYTES = 16
"""Bytes of a key that one access of a ROCm kernel reads."""


def _rocm_parts(spec: AttentionSpec, states: int) -> tuple[Part, ...]:
    """K as `[heads, size / x, tokens, x]`, x elements being 16 bytes, and V as `[heads, size, tokens]`.

    Each in a head slot of its own (vLLM 0.33 `PagedAttention.split_kv_cache`), so that no token lies in one piece.
    """
    item = item_bytes(spec.dtype)
    x = VECTOR_BYTES // item
    heads, head = spec.num_kv_heads, states * spec.head_size * item
    key = Part(
        name="key",
        dtype=spec.dtype,
        shape=(spec.head_size // x, x),
        offset=0,
        heads=heads,
        strides=(head, VECTOR_BYTES),
        steps=(states * VECTOR_BYTES, item),
    )
    shape, strides, steps = (spec.head_size,), (head, item), (states * item,)
    return key, dataclasses.replace(key, name="value", shape=shape, first_head=1, strides=strides, steps=steps)


def _halves(spec: AttentionSpec, states: int) -> tuple[Part, ...]:
    """K of every state, then V of every state, in each head's run (vLLM 0.33, CPU attention)."""
    key = spec.head_size * item_bytes(spec.dtype)
    value = spec.value_size * item_bytes(spec.dtype)
    head = states * (key + value)
    return (
        Part(name="key", dtype=spec.dtype, shape=(spec.head_size,), offset=0, strides=(head, key)),
        Part(name="value", dtype=spec.dtype, shape=(spec.value_size,), offset=states * key, strides=(head, value)),
    )
