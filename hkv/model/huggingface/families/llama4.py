"""Llama 4: chunked attention in layers with rotary positions, full attention in the others."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family_table import families
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.layer_kinds import FULL, Kinds
from hkv.model.huggingface.model import Model

CHUNKED = "chunked_attention"


def _read(decoder: Decoder) -> Model:
    fields = decoder.fields
    chunk = fields.optional("attention_chunk_size")
    layers = _kinds(fields)
    for index, (kind, names) in enumerate(layers):
        names = (*names, fields.place("attention_chunk_size"))
        decoder.attention(index, kind if chunk else FULL, names, window=chunk if kind == CHUNKED else None)
    return decoder.model(len(layers))


def _kinds(fields: Fields) -> Kinds:
    """By `no_rope_layers`, else every so manieth layer (vLLM 0.33 `Llama4Attention`).

    Raises:
      ConfigError: `layer_types`, which vLLM does not read, says otherwise.
    """
    rotary = fields.flags("no_rope_layers") if fields.raw("no_rope_layers") != [] else None
    if rotary is not None:
        kinds: Kinds = [(CHUNKED if flag else FULL, (place,)) for flag, place in rotary]
    else:
        interval = fields.integer("no_rope_layer_interval")
        kinds = [(CHUNKED if (i + 1) % interval.value else FULL, interval.names) for i in range(fields.num_layers)]
    listed = fields.names("layer_types", {FULL: FULL, CHUNKED: CHUNKED})
    for (kind, place), (own, _) in zip(listed or [], kinds, strict=False):
        if kind != own:
            raise ConfigError(place, kind, f"{own}, as no_rope_layers says to vLLM 0.33")
    if listed is None:
        return kinds
    return [(kind, (*names, place)) for (kind, names), (_, place) in zip(kinds, listed, strict=True)]


TABLE = """
model_type hidden layers heads kv_heads head_dim longest attention_chunk_size
llama4_text 5120 48 40 8 128 131072 8192 Llama 4
"""

FAMILIES = families(TABLE, _read, more={"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None})
