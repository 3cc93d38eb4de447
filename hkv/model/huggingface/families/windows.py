"""Windows in between full attention, by `layer_types` or by a rule of the family."""

from __future__ import annotations

from hkv.errors import ConfigError
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families.attention import attention
from hkv.model.huggingface.family_table import families
from hkv.model.huggingface.fields import Field, Fields
from hkv.model.huggingface.layer_kinds import (
    FULL,
    KNOWN,
    SLIDING,
    Kinds,
    every,
    patterned,
    periodic,
    shared_layer,
    window_of,
)
from hkv.model.huggingface.model import Model

HEADING = "model_type hidden layers heads kv_heads head_dim longest window"

SECOND = """
gemma2           2304 26 8  4  256 8192   4096 Gemma 2
vaultgemma       2304 26 8  4  256 8192   4096 VaultGemma
"""
FOURTH = """
olmo3            4096 32 32 -  -   2048   4096 OLMo 3
"""
FIFTH = """
kolibri1         2560 50 48 4  128 262144 513  Kolibri
"""
FIRST_OF_FOUR = """
granite_swa      2560 24 20 4  -   8192   128  Granite with windows
cwm              6144 64 48 8  128 131072 8192 CWM
"""
DIVIDED = """
granitemoe_swa   4096 32 32 -  .   2048   128  Granite MoE with windows
"""
FROM_THE_END = """
muse_glimmer_text 6656 52 32 2 128 131072 2048 Muse Glimmer
"""
GEMMA3 = """
gemma3_text      2304 26 8  4  256 131072 4096 Gemma 3
"""
EXAONE = """
exaone4          4096 32 32 32 -   2048   4096 EXAONE 4
exaone4_5_text   4096 32 32 32 -   2048   4096 EXAONE 4.5
"""
EXAONE_MOE = """
exaone_moe       4096 32 32 32 -   2048   4096 EXAONE MoE
"""
SIXTH_AND_LAST = """
beam             5120 52 48 8  128 8192   512  Beam
"""
MODERNBERT = """
modernbert-decoder 768 22 12 . .   8192   .    ModernBERT decoder
"""
AFMOE = """
afmoe            2048 32 16 -  128 16384  1024 AFMoE
"""
COHERE2 = """
cohere2          8192 40 64 -  .   8192   4096 Command R7B
"""
DOTS1 = """
dots1            4608 62 32 32 .   2048   4096 dots.llm1
"""
MINISTRAL = """
ministral        4096 32 32 8  -   131072 4096 Ministral
"""
COMPASS = """
cohere_compass_text 8192 40 64 - . 8192   4096 Cohere Compass
"""
COHERE2_MOE = """
cohere2_moe      8192 40 64 -  128 8192   4096 Cohere 2 MoE
"""
GPT_OSS = """
gpt_oss          2880 36 64 8  64  131072 128  gpt-oss
"""
GEMMA3N = """
gemma3n_text     2048 35 8  2  256 32768  512  Gemma 3n
"""
SMOLLM3 = """
smollm3          2048 36 16 4  -   32768  -    SmolLM3
"""


def _exaone(fields: Fields) -> Kinds:
    """Without a window, all full attention; else as the period says."""
    if window_of(fields) is None:
        return [(FULL, (fields.place("sliding_window"),))] * fields.num_layers
    return periodic("sliding_window_pattern")(fields)


def _cohere2(decoder: Decoder) -> Model:
    """Windows are a token longer than the file says: the query's own (vLLM 0.33 `CohereAttention`)."""
    fields = decoder.fields
    layers = periodic("sliding_window_pattern")(fields)
    window = window_of(fields)
    for index, (kind, names) in enumerate(layers):
        longer = Field(window.value + 1, window.names) if kind == SLIDING and window else None
        decoder.attention(index, kind, names, window=longer)
    return decoder.model(len(layers))


def _compass(decoder: Decoder) -> Model:
    """As Command R7B, but all full attention where the file lists no types."""
    fields = decoder.fields
    layers, window = patterned(lambda index, count: False)(fields), window_of(fields)
    for index, (kind, names) in enumerate(layers):
        longer = Field(window.value + 1, window.names) if kind == SLIDING and window else None
        decoder.attention(index, kind, names, window=longer)
    return decoder.model(len(layers))


def _dots1(fields: Fields) -> Kinds:
    """By `layer_types`, else a window in layers from `max_window_layers` on."""
    first = fields.count("max_window_layers")
    kinds = patterned(lambda index, _: index >= first)(fields)
    place = () if fields.given("layer_types") else (fields.place("max_window_layers"),)
    return [(kind, (*names, *place)) for kind, names in kinds]


def _cohere2_moe_kinds(fields: Fields) -> Kinds:
    """The first layers, dense ones, have a pattern of their own."""
    listed = every(1)(fields) if fields.given("layer_types") else None
    if listed is not None:
        return listed
    dense, first = fields.count("first_k_dense_replace"), fields.integer("prefix_dense_sliding_window_pattern")
    period = fields.integer("sliding_window_pattern")
    names = (*first.names, *period.names, fields.place("first_k_dense_replace"))
    count = fields.num_layers
    prefix = [(SLIDING if (i + 1) % first.value else FULL, names) for i in range(min(dense, count))]
    return prefix + [(SLIDING if (i + 1) % period.value else FULL, names) for i in range(count - len(prefix))]


def _cohere2_moe(decoder: Decoder) -> Model:
    fields = decoder.fields
    layers, window = _cohere2_moe_kinds(fields), window_of(fields)
    for index, (kind, names) in enumerate(layers):
        longer = Field(window.value + 1, window.names) if kind == SLIDING and window else None
        decoder.attention(index, kind, names, window=longer)
    return decoder.model(len(layers))


def _gpt_oss(fields: Fields) -> Kinds:
    """Every second layer has a window, whatever the file lists (vLLM 0.33 `OAIAttention`).

    Raises:
      ConfigError: the file lists other layers.
    """
    kinds = every(2)(fields)
    for index, (kind, names) in enumerate(kinds):
        if kind != (FULL if index % 2 else SLIDING):
            raise ConfigError(names[0], kind, "windows in layers 0, 2, 4 ..., which is how vLLM 0.33 serves gpt-oss")
    return kinds


def _gemma3n(decoder: Decoder) -> Model:
    """The last layers read the cache of the last layer of their kind that has one."""
    fields = decoder.fields
    layers = every(5)(fields)
    kinds = [kind for kind, _ in layers]
    for index, (kind, names) in enumerate(layers):
        shares = shared_layer(fields, kinds, index)
        shared = (*names, fields.place("num_kv_shared_layers")) if shares is not None else names
        window = window_of(fields) if kind == SLIDING else None
        decoder.attention(index, kind, shared, window=window, shares=shares)
    return decoder.model(len(layers))


def _smollm3(fields: Fields) -> Kinds:
    """With `use_sliding_window`, layers without rotary positions have the window."""
    if fields.given("layer_types"):
        return every(1)(fields)
    if window_of(fields) is None:
        return [(FULL, (fields.place("sliding_window"), fields.place("use_sliding_window")))] * fields.num_layers
    rotary = fields.flags("no_rope_layers")
    if rotary is not None:
        return [(FULL if flag else SLIDING, (place,)) for flag, place in rotary]
    interval = fields.integer("no_rope_layer_interval")
    return [(FULL if (i + 1) % interval.value else SLIDING, interval.names) for i in range(fields.num_layers)]


def _modernbert(decoder: Decoder) -> Model:
    """Half of `local_attention`, in two of three layers."""
    fields = decoder.fields
    period, local = fields.integer("global_attn_every_n_layers"), fields.integer("local_attention")
    listed = fields.names("layer_types", KNOWN)
    layers: Kinds = [(SLIDING if i % period.value else FULL, period.names) for i in range(fields.num_layers)]
    if listed is not None:
        layers = [(kind, (place,)) for kind, place in listed]
    for index, (kind, names) in enumerate(layers):
        window = Field(local.value // 2, local.names) if kind == SLIDING else None
        decoder.attention(index, kind, names, window=window)
    return decoder.model(len(layers))


LISTED = {"layer_types": None}
PERIOD = {"layer_types": None, "sliding_window_pattern": 4}

FAMILIES = {
    **families(HEADING + SECOND, attention(every(2)), more=LISTED),
    **families(HEADING + FOURTH, attention(every(4)), more=LISTED),
    **families(HEADING + FIFTH, attention(every(5)), more=LISTED),
    **families(HEADING + FIRST_OF_FOUR, attention(patterned(lambda i, _: i % 4 != 0)), more=LISTED),
    **families(HEADING + DIVIDED, attention(patterned(lambda i, _: i % 4 != 0)), more=LISTED),
    **families(HEADING + FROM_THE_END, attention(patterned(lambda i, count: (count - 1 - i) % 4 != 0)), more=LISTED),
    **families(
        HEADING + GEMMA3,
        attention(periodic("sliding_window_pattern")),
        more={"layer_types": None, "sliding_window_pattern": 6},
        spellings={"_sliding_window_pattern": "sliding_window_pattern"},
        only={"use_bidirectional_attention": False},
    ),
    **families(HEADING + EXAONE, attention(_exaone), more=PERIOD),
    **families(HEADING + EXAONE_MOE, attention(_exaone), more=PERIOD),
    **families(
        HEADING + SIXTH_AND_LAST, attention(patterned(lambda i, count: (i + 1) % 6 != 0 and i < count - 1)), more=LISTED
    ),
    **families(
        HEADING + MODERNBERT,
        _modernbert,
        more={"layer_types": None, "global_attn_every_n_layers": 3, "local_attention": 128},
    ),
    **families(
        HEADING + AFMOE,
        attention(periodic("global_attn_every_n_layers")),
        more={"layer_types": None, "global_attn_every_n_layers": 4},
    ),
    **families(HEADING + COHERE2, _cohere2, more=PERIOD),
    **families(HEADING + DOTS1, attention(_dots1), more={"layer_types": None, "max_window_layers": 62}),
    **families(HEADING + MINISTRAL, attention(patterned(lambda index, count: True)), more=LISTED),
    **families(HEADING + COMPASS, _compass, more=LISTED),
    **families(
        HEADING + COHERE2_MOE,
        _cohere2_moe,
        more={**PERIOD, "first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1},
    ),
    **families(HEADING + GPT_OSS, attention(_gpt_oss), more=LISTED),
    **families(HEADING + GEMMA3N, _gemma3n, more={"layer_types": None, "num_kv_shared_layers": 15}),
    **families(
        HEADING + SMOLLM3,
        attention(_smollm3),
        more={
            "layer_types": None,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
}
