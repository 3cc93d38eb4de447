"""Plain attention: every layer alike, or windows where `layer_types` puts them."""

from __future__ import annotations

from collections.abc import Callable

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family_table import families
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.layer_kinds import (
    FULL,
    SLIDING,
    Kinds,
    all_or_none,
    everywhere,
    later_layers,
    patterned,
    stated,
    window_of,
)
from hkv.model.huggingface.model import Model


def attention(kinds: Callable[[Fields], Kinds]) -> Callable[[Decoder], Model]:
    """A reader of layers with one geometry, of the kinds that a rule gives."""

    def read(decoder: Decoder) -> Model:
        fields = decoder.fields
        layers = kinds(fields)
        for index, (kind, names) in enumerate(layers):
            decoder.attention(index, kind, names, window=window_of(fields) if kind == SLIDING else None)
        return decoder.model(len(layers))

    return read


def _zaya(decoder: Decoder) -> Model:
    """Full attention alone, its keys after convolutions (vLLM 0.33 `TransformersMoEForCausalLM`).

    The backend knows no layer type of Zaya's: none has a window, and nothing keeps what the convolutions have seen.
    """
    count = decoder.fields.num_layers
    for index in range(count):
        decoder.attention(index, FULL, ())
    told = "vLLM 0.33 plans keys and values alone, without states of convolutions or delayed values"
    decoder.fields.notes["zaya"] = told
    return decoder.model(count)


STATED = """
model_type            hidden layers heads kv_heads head_dim longest window layer_types
llama                 4096 32 32 -  -   2048   -    - Llama
mistral               4096 32 32 8  -   131072 4096 - Mistral
ministral3            4096 34 32 8  128 262144 -    - Ministral 3
arcee                 2560 32 32 -  -   4096   -    - Arcee
apertus               4096 32 32 -  -   65536  -    - Apertus
ernie4_5              1024 18 16 2  128 131072 -    - ERNIE 4.5
glm                   4096 40 32 2  128 131072 -    - GLM-4
granite               4096 32 32 -  -   2048   -    - Granite
jais2                 3328 32 26 -  -   8192   -    - Jais 2
hunyuan_v1_dense      4096 32 32 -  -   2048   -    - Hunyuan
hunyuan_v1_moe        4096 32 32 -  -   2048   -    - Hunyuan MoE
hunyuan_vl_text       4096 32 32 -  -   2048   -    - Hunyuan VL
olmo                  4096 32 32 -  -   2048   -    - OLMo
olmo2                 4096 32 32 -  -   2048   -    - OLMo 2
phi                   2048 24 32 -  -   2048   -    - Phi
seed_oss              4096 64 80 8  128 524288 -    - Seed-OSS
starcoder2            3072 30 24 2  -   4096   -    - StarCoder2
flex_olmo             4096 32 32 -  -   4096   -    - FlexOlmo
aria_text             4096 32 32 -  -   2048   -    - Aria
emu3_text_model       4096 32 32 8  -   9216   -    - Emu3
paddleocr_vl_text     1024 18 16 2  128 131072 -    - PaddleOCR-VL
granite4_vision_text  4096 32 32 -  -   2048   -    - Granite 4 Vision
gpt_neox              6144 44 64 .  -   2048   -    - GPT-NeoX
bitnet                2560 30 20 5  -   2048   -    - BitNet
doge                  1024 32 8  -  -   2048   -    - Doge
helium                2560 24 20 20 128 4096   -    - Helium
nanochat              768  12 6  -  -   2048   -    - nanochat
solar_open            4096 48 64 8  128 131072 -    - Solar Open
persimmon             4096 36 64 .  -   16384  -    - Persimmon
biogpt                1024 24 16 .  -   1024   -    - BioGPT
kyutai_speech_to_text 2048 48 32 -  -   750    375  - Kyutai STT
moshi                 4096 32 32 -  -   3000   3000 - Moshi
internlm3             !    !  !  -  -   !      -    - InternLM3
iquestcoder           !    !  !  -  -   !      -    - IQuest-Coder
telechat3             !    !  !  -  -   !      -    - TeleChat3
"""
"""Models whose code in vLLM 0.33 looks at `layer_types`: LlamaForCausalLM and its kin, and the transformers backend."""

UNIFORM = """
model_type            hidden layers heads kv_heads head_dim longest window
cohere                8192 40 64 -  -   8192   - Command R
gemma                 3072 28 16 16 256 8192   - Gemma
glm4                  4096 40 32 2  128 131072 - GLM-4-0414
glm4_moe              4096 46 96 8  !   131072 - GLM-4.5
hy_v3                 4096 80 64 8  128 131072 - Hunyuan 3
hyperclovax           4096 32 32 -  -   2048   - HyperCLOVA X
mixtral               4096 32 32 8  -   131072 - Mixtral
nemotron              6144 32 48 -  -   4096   - Nemotron
minimax_m2            3072 62 48 8  128 196608 - MiniMax-M2
ernie4_5_moe          2560 28 20 4  -   131072 - ERNIE 4.5 MoE
ernie4_5_vl_moe_text  2560 28 20 4  -   131072 - ERNIE 4.5 VL
glm4v_text            4096 40 32 2  -   32768  - GLM-4V
glm4v_moe_text        4096 46 96 8  -   65536  - GLM-4.5V
glm_ocr_text          1024 16 16 8  -   131072 - GLM-OCR
qwen3_vl_text         4096 32 32 32 128 128000 - Qwen3-VL
qwen3_vl_moe_text     2048 24 16 16 -   128000 - Qwen3-VL MoE
qwen3_omni_moe_text   2048 28 28 4  -   32768  - Qwen3-Omni
molmo2_text           4096 36 32 8  128 36864  - Molmo 2
solar                 !    !  !  -  -   !      - Solar
exaone                !    !  !  -  -   !      - EXAONE 3
bailing_moe           !    !  !  -  -   !      - Ling
phimoe                4096 32 32 8  -   131072 - Phi-3.5-MoE
cosmos3_edge_text     2048 28 16 8  128 131072 - Cosmos 3 Edge
mllama_text_model     4096 40 32 8  -   131072 - Llama 3.2 Vision
"""
"""Models of which every layer is the same, in vLLM 0.33."""

DIVIDED = """
model_type            hidden layers heads kv_heads longest window
granitemoe            4096 32 32 -  2048  - Granite MoE
granitemoeshared      4096 32 32 -  2048  - Granite MoE with shared experts
olmoe                 2048 16 16 -  4096  - OLMoE
stablelm              2560 32 32 32 4096  - StableLM
opt                   768  12 12 .  2048  - OPT
internlm2             !    !  !  -  !     - InternLM2
orion                 !    !  !  -  !     - Orion
minicpm               !    !  !  -  !     - MiniCPM
deepseek              !    !  !  -  !     - DeepSeek
"""
"""The same, without a field for the size of a head."""

GPT = """
model_type   hidden layers heads longest window
gpt2         768  12 12 1024 - GPT-2
gpt-sw3      768  12 12 1024 - GPT-SW3
gptj         4096 28 16 2048 - GPT-J
ctrl         1280 48 16 256  - CTRL
"""

KOSMOS = """
model_type            hidden layers heads longest window
kosmos_2_text_model   2048 24 32 2048 - Kosmos-2
kosmos_2_5_text_model 1536 24 16 4096 - Kosmos-2.5
"""
"""GPT-2 and its kin, whose fields have names of their own."""

GPT_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}

BLOOM = """
model_type   hidden layers heads seq_length window
bloom        64 2 8 - - BLOOM
"""

PHI3 = """
model_type   hidden layers heads kv_heads head_dim longest window layer_types original_max_position_embeddings
phi3         3072 32 32 - - 4096 - - 4096 Phi-3
phi4_multimodal 3072 32 32 8 - 131072 - - 4096 Phi-4-multimodal
"""

LAGUNA = """
model_type   hidden layers heads kv_heads head_dim longest window
laguna       2048 40 48 8 128 131072 512  Laguna
mellum       2304 28 32 4 128 131072 1024 Mellum
"""
"""Families whose config class makes every layer full attention where the file lists none."""

LATER = """
model_type            hidden layers heads kv_heads head_dim longest window use_sliding_window max_window_layers
qwen2                 4096 32 32 32 .   32768 4096  false 28 Qwen2
qwen3                 4096 32 32 32 128 32768 4096  false 28 Qwen3
qwen2_vl_text         8192 80 64 8  .   32768 4096  false 80 Qwen2-VL
qwen2_5_vl_text       8192 80 64 8  .   32768 4096  false 80 Qwen2.5-VL
qwen2_5_omni_text     3584 28 28 4  .   32768 32768 false 28 Qwen2.5-Omni
mimo                  !    !  !  !  -   !     -     false !  MiMo
"""

MOE = """
model_type   hidden layers heads kv_heads head_dim longest window use_sliding_window
qwen3_moe    2048 24 32 4 - 32768 4096 false Qwen3 MoE
"""

QWEN2_MOE = """
model_type   hidden layers heads kv_heads longest window use_sliding_window
qwen2_moe    2048 24 16 16 32768 4096 false Qwen2 MoE
"""

ZAYA = """
model_type   hidden layers heads kv_heads head_dim longest
zaya         2048 40 8 2 128 131072 Zaya
"""

FAMILIES = {
    **families(STATED, attention(stated)),
    **families(UNIFORM, attention(everywhere)),
    **families(DIVIDED, attention(everywhere)),
    **families(GPT, attention(everywhere), spellings=GPT_NAMES),
    **families(
        KOSMOS,
        attention(everywhere),
        inert="ffn_dim layerdrop init_std scale_embedding",
        spellings={"embed_dim": "hidden_size", "layers": "num_hidden_layers", "attention_heads": "num_attention_heads"},
    ),
    **families(
        BLOOM,
        attention(everywhere),
        spellings={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    ),
    **families(PHI3, attention(stated)),
    **families(LAGUNA, attention(patterned(lambda index, count: False)), more={"layer_types": None}),
    **families(LATER, attention(later_layers), more={"layer_types": None}),
    **families(MOE, attention(everywhere)),
    **families(ZAYA, _zaya, inert="layer_types sliding_window cca_time0 cca_time1 router_hidden_size"),
    **families(QWEN2_MOE, attention(all_or_none), more={"layer_types": None}),
}
