"""Arithmetic from a family's facts to caches, which all families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.common_fields import longest_request, quantized_cache, served_dtype
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import CacheLayer, Model, ReadOptions
from hkv.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LayerSpec,
    Mamba,
    MLAAttention,
    SlidingWindow,
    SlidingWindowMLA,
)
from hkv.spec.dtypes import ITEM_BYTES, item_bytes

CROSS = "cross_attention"

TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Bits of an element of a key and of a value (vLLM 0.33 `TQ_PRESETS`)."""


@dataclasses.dataclass
class Decoder:
    """Collects a model's caches. One of them is made for each call of a family's reader."""

    fields: Fields
    options: ReadOptions
    default_block_size: int = 16
    layers: list[CacheLayer] = dataclasses.field(default_factory=list)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.options.block_size or self.default_block_size

    @property
    def dtype(self) -> tuple[str, tuple[str, ...]]:
        """The element type that the model is served with and the field that says so."""
        return (self.options.dtype, ()) if self.options.dtype is not None else served_dtype(self.fields)

    def shard(self, heads: Field) -> int:
        """Heads on one tensor-parallel rank: an equal share, or one that several ranks hold."""
        ranks = self.options.tensor_parallel
        if heads.value % ranks and ranks % heads.value:
            expected = f"a multiple or a divisor of {ranks} tensor-parallel ranks"
            raise ConfigError(" x ".join(heads.names), heads.value, expected)
        return max(1, heads.value // ranks)

    def divide(self, size: Field) -> int:
        """An equal share of a size."""
        ranks = self.options.tensor_parallel
        if size.value % ranks:
            expected = f"a multiple of {ranks} tensor-parallel ranks"
            raise ConfigError(" x ".join(dict.fromkeys(size.names)), size.value, expected)
        return size.value // ranks

    def _packing(self, latent: bool = False) -> tuple[str, str, tuple[str, ...]]:
        """Element type of the cache, quantization, and the fields that decide them; of latent layers or others."""
        kv, origin = self.options.kv_dtype, ()
        if kv == "auto" and (stored := quantized_cache(self.fields, latent)) is not None:
            kv, origin = stored
        if kv == "auto":
            name, fields = self.dtype
            return name, "none", fields
        if kv in ("fp8", "fp8_e4m3", "fp8_inc", "fp8_per_token_head"):
            return "float8_e4m3fn", kv if kv == "fp8_per_token_head" else "fp8_per_tensor", origin
        if kv == "fp8_e5m2":
            return "float8_e5m2", "fp8_per_tensor", ()
        if kv in ("nvfp4", "nvfp4_4over6"):
            return "uint8", "nvfp4", origin
        if kv in TURBOQUANT_BITS:
            return "uint8", kv, ()
        if kv in ("int8_per_token_head", "int4_per_token_head"):
            return "int8" if kv.startswith("int8") else "uint8", kv, ()
        if kv.endswith("_ds_mla"):
            raise ConfigError("kv_dtype", kv, "a packing of keys and values; this one is for latent attention")
        return kv, "none", ()

    def attention(
        self,
        index: int,
        kind: str,
        kind_fields: tuple[str, ...],
        *,
        heads: Field | None = None,
        head_dim: Field | None = None,
        value_dim: Field | None = None,
        window: Field | None = None,
        shares: int | None = None,
        part: str = "",
        causal: bool = True,
    ) -> None:
        """Adds a layer with keys and values, of a kind and with the fields that say so.

        Heads, before sharding, and sizes are the config's where they are left out, values' size that of keys. The
        window is one of tokens, a chunk's or the encoder's output; without one a window layer caches like full
        attention, as in vLLM. A layer that shares another's cache has none; `part` names one of several.
        """
        heads = heads or self.fields.derived("num_key_value_heads", self.fields.kv_heads)
        head_dim = head_dim or self.fields.head_dim
        if kind == "sliding_attention" and window is None:
            kind, kind_fields = "full_attention", (*kind_fields, self.fields.place("sliding_window"))
        dtype, quantization, dtype_fields = self._packing()
        content = _cell_bytes(quantization, dtype, head_dim.value, (value_dim or head_dim).value)
        replicated = kind != "full_attention" and self.options.context_parallel > 1
        geometry = {
            "block_size": self.block_size,
            "num_kv_heads": self.shard(heads),
            "head_size": head_dim.value,
            "head_size_v": (value_dim or head_dim).value,
            "dtype": dtype,
            "quantization": quantization,
            "state_content_bytes": None if quantization in ("none", "fp8_per_tensor") else content,
            "num_head_slots": None,
            "cp_sharded": not replicated,
            "is_draft": self.options.draft,
        }
        if quantization in TURBOQUANT_BITS and kind != "full_attention":
            raise ConfigError("kv_dtype", quantization, f"another packing: {quantization} has no kernels for {kind}")
        if kind == CROSS and quantization == "nvfp4":
            raise ConfigError(
                "kv_dtype", self.options.kv_dtype, "another packing: that of cross attention is not known"
            )
        if quantization == "nvfp4":
            self._in_halves(geometry, head_dim, value_dim or head_dim)
        spec: LayerSpec
        if kind == "full_attention":
            spec = FullAttention(**geometry, non_causal=not causal)
        elif window is None:
            raise ConfigError(self.fields.place("attention_chunk_size"), None, f"a chunk for {kind} ({kind_fields[0]})")
        elif kind == "sliding_attention":
            spec = SlidingWindow(**geometry, window=window.value)
        elif kind == CROSS:
            spec = CrossAttention(**geometry, encoder_len=window.value)
        else:
            spec = ChunkedLocal(**geometry, chunk=window.value)
        size = (*head_dim.names, *(value_dim.names if value_dim else ()))
        origin = {"kind": kind_fields, "heads": heads.names, "size": tuple(dict.fromkeys(size)), "dtype": dtype_fields}
        if window is not None and kind != "full_attention":
            origin["window"] = window.names
        full = 0 if kind == CROSS else geometry["num_kv_heads"] * content
        if shares is None:
            self.layers.append(CacheLayer(layer_name(index, part), index, spec, origin, full_token_bytes=full))
        else:
            sharing = {"kind": kind_fields}
            self.layers.append(CacheLayer(layer_name(index), index, None, sharing, layer_name(shares), full))

    def _in_halves(self, geometry: dict[str, Any], key: Field, value: Field) -> None:
        """Puts keys and values into slots of their own, as four-bit kernels read them (vLLM 0.33 FlashInfer)."""
        if key.value != value.value:
            raise ConfigError("kv_dtype", self.options.kv_dtype, "another packing: keys and values differ in size")
        geometry["num_head_slots"] = 2 * geometry["num_kv_heads"]
        geometry["state_content_bytes"] //= 2

    def latent(
        self,
        index: int,
        kind_fields: tuple[str, ...] = (),
        part: str = "",
        *,
        indexed: bool = False,
        sizes: tuple[Field, Field] | None = None,
        window: Field | None = None,
    ) -> None:
        """Adds a multi-head latent attention layer: one vector of `kv_lora_rank + qk_rope_head_dim` a token.

        One that is `indexed` has an indexer of its own, whose picks others may read; one may read a window alone.
        """
        rank, rope = sizes or (self.fields.integer("kv_lora_rank"), self.fields.integer("qk_rope_head_dim"))
        kv = self.options.kv_dtype
        packed = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(kv)
        if packed is not None:
            dtype, quantization, dtype_fields = "uint8", kv, ()
        else:
            dtype, quantization, dtype_fields = self._packing(latent=True)
        if quantization == "nvfp4" or quantization in TURBOQUANT_BITS:
            raise ConfigError("kv_dtype", kv, "a packing of latents, such as nvfp4_ds_mla; this is of keys and values")
        size = rank.plus(rope)
        content = packed or _cell_bytes(quantization, dtype, size.value, 0)
        geometry = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": size.value,
            "dtype": dtype,
            "quantization": quantization,
            "cache_dtype": kv,
            "state_content_bytes": None if quantization in ("none", "fp8_per_tensor") else content,
            "max_tp_shards": 1,
            "is_draft": self.options.draft,
        }
        origin = {"kind": (*kind_fields, *rank.names), "size": size.names, "dtype": dtype_fields}
        spec: LayerSpec
        if window is None:
            spec = MLAAttention(**geometry, cp_sharded=True, is_index_group_leader=indexed)
        else:
            alone = self.options.context_parallel == 1
            spec, origin["window"] = SlidingWindowMLA(**geometry, window=window.value, cp_sharded=alone), window.names
        self.layers.append(CacheLayer(layer_name(index, part), index, spec, origin, full_token_bytes=content))

    def state(
        self,
        index: int,
        kind_fields: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[tuple[str, tuple[str, ...]], ...],
        size_fields: tuple[str, ...],
        heads_fields: tuple[str, ...] = (),
        checkpoint: int | None = None,
        part: str = "",
        on_grid: bool = True,
    ) -> None:
        """Adds a layer with recurrent states, by their shapes on this rank and their element types with their fields.

        With a `checkpoint` it keeps a state inside each chunk of a prompt, at multiples of so many tokens (vLLM 0.33:
        the mixer's own `get_kv_cache_spec`), where blocks end, or, not `on_grid`, wherever its kernel can leave one.
        """
        spec = Mamba(
            block_size=self.block_size,
            shapes=shapes,
            dtypes=tuple(name for name, _ in dtypes),
            num_speculative_blocks=self.options.speculative_tokens,
            num_prefill_checkpoint_blocks=int(checkpoint is not None),
            prefill_checkpoint_alignment=checkpoint,
            checkpoints_on_grid=on_grid,
            is_draft=self.options.draft,
        )
        origin = {
            "kind": kind_fields,
            "heads": heads_fields,
            "state": tuple(dict.fromkeys(size_fields)),
            "dtype": tuple(dict.fromkeys(name for _, names in dtypes for name in names)),
        }
        name = layer_name(index, part)
        self.layers.append(CacheLayer(name, index, spec, origin, full_token_bytes=0 if part else self.full_bytes()))

    def full_bytes(self) -> int:
        """Bytes a token costs in one of the model's full-attention layers; 0 where the family has none."""
        dtype, quantization, _ = self._packing(self.fields.has("kv_lora_rank"))
        if not {"num_attention_heads", "kv_lora_rank"} & self.fields.family.fields.keys():
            return 0
        if self.fields.has("kv_lora_rank"):
            size = self._integer("kv_lora_rank") + self._integer("qk_rope_head_dim")
            return _cell_bytes(quantization, dtype, size, 0)
        size = self.fields.head_dim.value
        return self.shard(self.fields.kv_heads) * _cell_bytes(quantization, dtype, size, size)

    def state_dtype(self, *names: str, default: str | None = None) -> tuple[str, tuple[str, ...]]:
        """Element type of a recurrent state: the options', else the first of these fields, else the default's."""
        if self.options.state_dtype is not None:
            return self.options.state_dtype, ()
        for name in names:
            value = self.fields.raw(name)
            if value is not None and value != "auto":
                if not isinstance(value, str) or value not in ITEM_BYTES:
                    raise ConfigError(self.fields.place(name), value, f"one of {', '.join(ITEM_BYTES)}")
                return value, (self.fields.place(name),)
        return (default, ()) if default is not None else self.dtype

    def model(self, num_layers: int, layouts: tuple[str, ...] | None = None) -> Model:
        """The model with what was added."""
        latent = self.fields.has("kv_lora_rank")
        return Model(
            model_type=self.fields.model_type,
            layers=tuple(self.layers),
            num_layers=num_layers,
            max_model_len=longest_request(self.fields),
            notes=tuple(self.fields.notes.values()),
            layouts=layouts,
            tensor_parallel=self.options.tensor_parallel,
            latent_sizes=(self._integer("kv_lora_rank"), self._integer("qk_rope_head_dim")) if latent else None,
            indexer_size=self._integer("index_head_dim") if self.fields.has("index_head_dim") else None,
        )

    def _integer(self, name: str) -> int:
        return self.fields.integer(name).value


def every_layer(add: Callable[[Decoder, int], object]) -> Callable[[Decoder], Model]:
    """A reader of layers that are all added alike."""

    def read(decoder: Decoder) -> Model:
        count = decoder.fields.num_layers
        for index in range(count):
            add(decoder, index)
        return decoder.model(count)

    return read


def layer_name(index: int, part: str = "") -> str:
    """Name of a decoder layer's cache: `layers.3`, or `layers.3.mixer` for one of several."""
    return f"layers.{index}.{part}" if part else f"layers.{index}"


def _cell_bytes(quantization: str, dtype: str, key: int, value: int) -> int:
    """Bytes of one (head, token): a key, a value, and their scales where the packing has some."""
    if quantization == "nvfp4":
        return sum(size // 2 + size // 16 for size in (key, value))  # two to a byte, a scale for each 16
    if quantization in TURBOQUANT_BITS:
        key_bits, value_bits = TURBOQUANT_BITS[quantization]
        norm = 0 if key_bits == 8 else 2
        slot = -(-key * key_bits // 8) + norm + -(-value * value_bits // 8) + 4  # scale and zero point, float16
        return slot + slot % 2
    if not quantization.endswith("_per_token_head"):
        return (key + value) * item_bytes(dtype)
    if quantization.startswith("int4"):
        key, value = key // 2, value // 2
    return (key + value) * item_bytes(dtype) + 8
