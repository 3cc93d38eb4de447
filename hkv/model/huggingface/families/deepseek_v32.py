"""DeepSeek-V3.2 and its kin: latent attention, and an indexer beside each layer that picks the tokens to read."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.model import CacheLayer, Model
from hkv.spec import MLAAttention

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")

SCALED = 128
"""Elements that share one float32 scale in an indexer's cache."""


def read(decoder: Decoder) -> Model:
    """The caches of a DeepSeek-V3.2 decoder: a latent and an indexer's key for each layer."""
    decoder.default_block_size = 64
    count = decoder.fields.num_layers
    for index in range(count):
        decoder.latent(index)
        add_indexer(decoder, index, tokens_per_state=1, alignment=None, kind_fields=())
    return decoder.model(count, layouts=None)


def add_indexer(
    decoder: Decoder, index: int, *, tokens_per_state: int, alignment: int | None, kind_fields: tuple[str, ...]
) -> None:
    """Adds an indexer's cache: float8 keys and a float32 scale for every 128 elements (vLLM 0.33).

    Args:
      decoder: decoder that the layer is added to.
      index: the decoder layer.
      tokens_per_state: tokens that share a key.
      alignment: bytes to which a page is rounded up, or None.
      kind_fields: fields that say that the layer has an indexer.
    """
    size = decoder.fields.integer("index_head_dim")
    content = size.value + size.value // SCALED * 4
    spec = MLAAttention(
        block_size=decoder.block_size,
        num_kv_heads=1,
        head_size=content,
        dtype="uint8",
        quantization="fp8_indexer",
        cache_role="indexer" if tokens_per_state == 1 else None,
        tokens_per_state=tokens_per_state,
        alignment=alignment,
        max_tp_shards=None if tokens_per_state == 1 else 1,
        cp_sharded=True,
        is_draft=decoder.options.draft,
    )
    origin = {"kind": (*kind_fields, *size.names), "size": size.names}
    full = content if tokens_per_state == 1 else 0
    decoder.layers.append(CacheLayer(f"layers.{index}.indexer", index, spec, origin, full_token_bytes=full))
