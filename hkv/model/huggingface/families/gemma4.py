"""Gemma 4: full-attention layers have heads of another size, and sometimes another number of them."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.standard import layer_kinds, shared_layer, window_of
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model

MODEL_TYPES = ("gemma4", "gemma4_text")


def read(decoder: Decoder) -> Model:
    """The caches of a Gemma 4 decoder."""
    fields = decoder.fields
    layers = layer_kinds(fields)
    kinds = [kind for kind, _ in layers]
    for index, (kind, names) in enumerate(layers):
        shares = shared_layer(fields, kinds, index)
        own = (*names, fields.path + "num_kv_shared_layers") if shares is not None else names
        decoder.attention(
            index,
            kind,
            own,
            heads=_override(fields, kind, index, "num_key_value_heads", "num_global_key_value_heads"),
            head_dim=_override(fields, kind, index, "head_dim", "global_head_dim"),
            window=window_of(fields, kind),
            shares=shares,
        )
    return decoder.model(len(layers))


def _override(fields: Fields, kind: str, index: int, name: str, full_name: str) -> Field:
    """A layer's own value of a field, else that of all full-attention layers, else the common one."""
    layers = fields.raw("per_layer_config")
    if isinstance(layers, dict):
        for key, values in layers.items():
            if str(key).isdigit() and int(key) == index and isinstance(values, dict) and name in values:
                value, path = values[name], f"{fields.path}per_layer_config.{key}.{name}"
                if type(value) is not int or value < 1:
                    raise ConfigError(path, value, "a positive integer")
                return Field(value, (path,))
    elif kind == "full_attention" and fields.has(full_name):
        if name != "num_key_value_heads" or fields.raw("attention_k_eq_v", True):
            return fields.integer(full_name)
    elif kind == "full_attention" and name == "head_dim":
        return Field(512, ())
    return fields.integer(name)
