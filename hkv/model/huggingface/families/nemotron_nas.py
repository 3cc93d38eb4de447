"""Llama-Nemotron (DeciLM): attention with key/value heads of each layer's own number, or without attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import REQUIRED, Family
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL
from hkv.model.huggingface.model import Model

UNUSED = {"window_length": None, "num_sink_tokens": None, "sparsify": None, "replace_with_linear": False}
"""Parts of a layer's attention that vLLM 0.33 does not read, at the value that asks for nothing."""

SWITCHES = ("unshifted_sink", "use_prefill_window_in_sink_attention")


def _read(decoder: Decoder) -> Model:
    fields = decoder.fields
    count = fields.num_layers
    blocks = fields.raw("block_configs")
    place = fields.place("block_configs")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise ConfigError(place, blocks, f"a list of {count} blocks, one a layer")
    for index, block in enumerate(blocks):
        where = f"{place}[{index}].attention"
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise ConfigError(where, attention, "an object")
        heads = _heads(fields, attention, where)
        if heads is not None:
            decoder.attention(index, FULL, (f"{where}.no_op",), heads=heads)
    return decoder.model(count)


def _heads(fields: Fields, attention: Mapping[str, Any], place: str) -> Field | None:
    """Key/value heads, or None for a layer without attention.

    Raises:
      ConfigError: the attention is of a kind that vLLM 0.33 does not know.
    """
    for name, value in attention.items():
        if name in UNUSED and value != UNUSED[name]:
            raise ConfigError(f"{place}.{name}", value, f"{UNUSED[name]}")
        if name not in ("n_heads_in_group", "no_op", *UNUSED, *SWITCHES):
            raise ConfigError(f"{place}.{name}", value, "n_heads_in_group, no_op or a part of DeciLM's attention")
    if attention.get("no_op"):
        return None
    group = attention.get("n_heads_in_group")
    check_whole(f"{place}.n_heads_in_group", group, 1, MAX_TOKENS)
    return fields.integer("num_attention_heads").over(Field(int(group or 1), (f"{place}.n_heads_in_group",)))


FAMILIES = {
    "nemotron-nas": Family(
        "Llama-Nemotron",
        _read,
        {
            "hidden_size": REQUIRED,
            "num_hidden_layers": REQUIRED,
            "num_attention_heads": REQUIRED,
            "head_dim": None,
            "block_configs": REQUIRED,
            "max_position_embeddings": REQUIRED,
        },
        frozenset(["num_key_value_heads"]),
    )
}
