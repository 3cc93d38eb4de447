"""MiMo-V2: window layers have key/value heads of their own number, and values are narrower than keys."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.standard import layer_kinds
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model

MODEL_TYPES = ("mimo_v2", "mimo_v2_flash")


def read(decoder: Decoder) -> Model:
    """The caches of a MiMo-V2 decoder."""
    fields = decoder.fields
    layers = _kinds(fields)
    for index, (kind, names) in enumerate(layers):
        local = kind == "sliding_attention"
        decoder.attention(
            index,
            kind,
            names,
            heads=_window_heads(fields) if local else fields.kv_heads,
            head_dim=fields.integer("swa_head_dim", "head_dim") if local else fields.head_dim,
            value_dim=fields.integer("swa_v_head_dim", "v_head_dim") if local else fields.integer("v_head_dim"),
            window=fields.integer("sliding_window", "sliding_window_size") if local else None,
        )
    return decoder.model(len(layers))


def _window_heads(fields: Fields) -> Field:
    """Key/value heads of a window layer: given, or twice those of a full layer."""
    if fields.has("swa_num_key_value_heads"):
        return fields.integer("swa_num_key_value_heads")
    return fields.kv_heads.times(2)


def _kinds(fields: Fields) -> list[tuple[str, tuple[str, ...]]]:
    pattern = fields.raw("hybrid_layer_pattern")
    if fields.has("layer_types") or pattern is None:
        return layer_kinds(fields)
    name = fields.path + "hybrid_layer_pattern"
    if not isinstance(pattern, list) or not all(flag in (0, 1) for flag in pattern):
        raise ConfigError(name, pattern, "a list of 0 (full attention) and 1 (window)")
    kinds = ("full_attention", "sliding_attention")
    return [(kinds[flag], (f"{name}[{i}]",)) for i, flag in enumerate(pattern)]
