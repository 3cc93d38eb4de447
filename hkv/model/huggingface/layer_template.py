"""A list of layers to begin with, for a config that HKV refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def layer_template(config: Mapping[str, Any]) -> str:
    """A list of full-attention layers in one line of JSON, with the numbers that the config has under common names."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = inner

    def number(default: int, *names: str) -> int:
        found = (config.get(name) for name in names)
        return next((value for value in found if type(value) is int and value > 0), default)

    heads = number(8, "num_attention_heads", "n_head")
    layer = {
        "kind": "full_attention",
        "count": number(32, "num_hidden_layers", "n_layer"),
        "kv_heads": number(heads, "num_key_value_heads"),
        "head_dim": number(max(1, number(128 * heads, "hidden_size", "n_embd") // heads), "head_dim"),
    }
    longest = number(4096, "max_position_embeddings", "n_positions")
    return json.dumps({"model_type": "layer_list", "max_position_embeddings": longest, "layers": [layer]})
