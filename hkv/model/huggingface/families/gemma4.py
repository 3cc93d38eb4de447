"""Gemma 4: full-attention layers have heads of another size, and sometimes another number of them."""

from __future__ import annotations

from collections.abc import Mapping

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family_table import families
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import FULL, SLIDING, Kinds, every, shared_layer, window_of
from hkv.model.huggingface.model import Model


def _read(decoder: Decoder) -> Model:
    fields = decoder.fields
    if fields.raw("use_bidirectional_attention") not in (None, "vision"):
        expected = "null or vision: with all, the model keeps no cache"
        raise ConfigError(
            fields.place("use_bidirectional_attention"), fields.raw("use_bidirectional_attention"), expected
        )
    layers = _kinds(fields)
    kinds = [kind for kind, _ in layers]
    for index, (kind, names) in enumerate(layers):
        shares = shared_layer(fields, kinds, index)
        own = (*names, fields.place("num_kv_shared_layers")) if shares is not None else names
        decoder.attention(
            index,
            kind,
            own,
            heads=_override(fields, kind, index, "num_key_value_heads"),
            head_dim=_override(fields, kind, index, "head_dim"),
            window=window_of(fields) if kind == SLIDING else None,
            shares=shares,
        )
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> Kinds:
    """Every sixth layer is full attention, and the last one in any case (transformers `Gemma4TextConfig`)."""
    kinds = every(6)(fields)
    return [*kinds[:-1], (FULL, kinds[-1][1])]


def _override(fields: Fields, kind: str, index: int, name: str) -> Field:
    """A layer's own value of a field, else that of all full-attention layers, else the common one."""
    if fields.raw("per_layer_config") is not None:
        layers = fields.nested("per_layer_config")
        for key, values in layers.items():
            if str(key).isdigit() and int(key) == index and isinstance(values, Mapping) and name in values:
                place = f"{fields.place('per_layer_config')}.{key}.{name}"
                check_whole(place, values[name], 1, MAX_TOKENS)
                return Field(values[name], (place,))
        return fields.integer(name)
    if kind != FULL:
        return fields.integer(name)
    if name == "head_dim":
        return fields.integer("global_head_dim")
    own = fields.optional("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
    common = fields.integer(name)
    names = (fields.place("num_global_key_value_heads"), fields.place("attention_k_eq_v"))
    if own is not None:
        return Field(own.value, names)
    if fields.flag("attention_k_eq_v"):
        fields.derived("num_global_key_value_heads", common)
    return Field(common.value, (*common.names, *names))


TABLE = """
model_type hidden layers heads kv_heads head_dim longest window
gemma4_text         2304 30 8 4 256 131072 512  Gemma 4
diffusion_gemma_text 2304 30 8 4 256 131072 512 DiffusionGemma
gemma4_unified_text 2304 30 8 4 256 262144 1024 Gemma 4 unified
"""

FAMILIES = families(
    TABLE,
    _read,
    more={
        "layer_types": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "per_layer_config": None,
        "use_bidirectional_attention": None,
    },
)
