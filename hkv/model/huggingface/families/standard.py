"""Any decoder that the standard fields describe: layer types, heads, a window, a chunk, a latent, shared caches."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.model import Model

CACHE_FIELDS = frozenset(
    [
        "attention_chunk_size",
        "full_attention_interval",
        "head_dim",
        "hidden_size",
        "kv_lora_rank",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "model_max_length",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_kv_shared_layers",
        "qk_rope_head_dim",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "use_sliding_window",
        "v_head_dim",
        "no_rope_layers",
        "no_rope_layer_interval",
        "dtype",
        "torch_dtype",
    ]
)
"""Fields this module reads."""

PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
"""Every so manieth layer is full attention in models that leave the pattern out of their config."""

KINDS = {
    "full_attention": "full_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "sliding_window_attention": "sliding_attention",
    "chunked_attention": "chunked_attention",
}
"""Names of layer types in configs, and what each is."""


def read(decoder: Decoder) -> Model:
    """The caches of a decoder that standard fields describe."""
    fields = decoder.fields
    layers = layer_kinds(fields)
    if fields.has("kv_lora_rank"):
        decoder.default_block_size = 64
    values = fields.integer("v_head_dim") if fields.has("v_head_dim") and not fields.has("kv_lora_rank") else None
    for index, (kind, names) in enumerate(layers):
        if kind == "full_attention" and fields.has("kv_lora_rank"):
            decoder.latent(index, names)
            continue
        shares = shared_layer(fields, [kind for kind, _ in layers], index)
        shared = (*names, fields.path + "num_kv_shared_layers") if shares is not None else names
        window = window_of(fields, kind)
        decoder.attention(index, kind, shared, value_dim=values, window=window, shares=shares)
    return decoder.model(len(layers))


def window_of(fields: Fields, kind: str) -> Field | None:
    """The window or chunk of a local layer; None for full attention."""
    if kind == "sliding_attention":
        return fields.integer("sliding_window")
    return fields.integer("attention_chunk_size") if kind == "chunked_attention" else None


def layer_kinds(fields: Fields, *, known: dict[str, str] | None = None) -> list[tuple[str, tuple[str, ...]]]:
    """`(kind, fields that say so)` of each layer.

    Args:
      fields: the config.
      known: names of layer types and what each is; the standard ones if None.

    Raises:
      ConfigError: a layer type that nobody knows; or no number of layers.
    """
    known = KINDS if known is None else known
    listed = fields.layer_types("layer_types")
    if listed is not None:
        for kind, name in listed:
            if kind not in known:
                raise ConfigError(name, kind, f"one of {', '.join(sorted(known))}")
        return [(known[kind], (name,)) for kind, name in listed]
    return _patterned(fields)


def _patterned(fields: Fields) -> list[tuple[str, tuple[str, ...]]]:
    """Layer kinds of a config without a list of them."""
    count, path = fields.num_layers, fields.path
    no_rope = fields.raw("no_rope_layers")
    if fields.has("attention_chunk_size"):
        return [_chunked(fields, no_rope, i) for i in range(count)]
    if not fields.has("sliding_window") or fields.raw("use_sliding_window") is False:
        return [("full_attention", ())] * count
    window = path + "sliding_window"
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if fields.has(name):
            period, names = fields.integer(name).value, (window, path + name)
            break
    else:
        period, names = PATTERNS.get(fields.model_type, 0), (window,)
    if period:
        return [("sliding_attention" if (i + 1) % period else "full_attention", names) for i in range(count)]
    first = fields.count("max_window_layers") if fields.raw("use_sliding_window") else 0
    names = (window, path + "max_window_layers") if first else (window,)
    return [("sliding_attention" if i >= first else "full_attention", names) for i in range(count)]


def _chunked(fields: Fields, no_rope: object, index: int) -> tuple[str, tuple[str, ...]]:
    """Llama 4: layers with rotary positions are chunked, the others full."""
    if isinstance(no_rope, list) and no_rope:
        if index >= len(no_rope):
            raise ConfigError(fields.path + "no_rope_layers", len(no_rope), "one entry for each layer")
        return ("chunked_attention" if no_rope[index] else "full_attention", (f"{fields.path}no_rope_layers[{index}]",))
    interval = fields.integer("no_rope_layer_interval", default=4)
    return ("chunked_attention" if (index + 1) % interval.value else "full_attention", interval.names)


def shared_layer(fields: Fields, kinds: list[str], index: int) -> int | None:
    """The layer whose cache a layer reads instead of its own: the last own one of its kind (Gemma 3n, Gemma 4).

    Raises:
      ConfigError: no layer before the shared ones is of that kind.
    """
    count = fields.count("num_kv_shared_layers")
    first = len(kinds) - count
    if not count or index < first or first <= 0:
        return None
    for candidate in range(first - 1, -1, -1):
        if kinds[candidate] == kinds[index]:
            return candidate
    expected = f"a {kinds[index]} layer before layer {first}, for layer {index} to share"
    raise ConfigError(fields.path + "num_kv_shared_layers", count, expected)
