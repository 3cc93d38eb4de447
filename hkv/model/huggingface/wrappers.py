"""Configs of multimodal models, which hold their decoder's config inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.family import words


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """One `model_type` around a decoder.

    Attributes:
      decoder: the decoder's `model_type` where the inner config names none.
      keys: names under which the inner config stands, the outermost first; it may stand under the first alone.
      flat: the decoder's fields may stand beside the others, without an inner config.
    """

    decoder: str
    keys: tuple[str, ...] = ("text_config",)
    flat: bool = False


TEXT = """
aria aria_text
audioflamingo3 qwen2
aya_vision cohere2
bee qwen3
blip-2 opt
cohere2_vision cohere2
cosmos3_edge cosmos3_edge_text
cosmos3_omni qwen3_vl_text
deepseek_vl llama
deepseek_vl_hybrid llama
cohere_compass cohere_compass_text
diffusion_gemma diffusion_gemma_text
emu3 emu3_text_model
ernie4_5_vl_moe ernie4_5_vl_moe_text
exaone4_5 exaone4
fast_vlm qwen2
fun_asr_nano qwen3
fuyu persimmon
gemma3 gemma3_text
gemma3n gemma3n_text
gemma4 gemma4_text
gemma4_unified gemma4_unified_text
glm46v glm4v_text
glm4v glm4v_text
glm4v_moe glm4v_moe_text
glm_ocr glm_ocr_text
glmasr llama
glmga glm4v_text
got_ocr2 qwen2
granite4_vision granite4_vision_text
granite_speech granite
granite_speech_plus granite
hunyuan_vl hunyuan_vl_text
hyperclovax_vision_v2 hyperclovax
idefics2 mistral
idefics3 llama
inkling_mm_model inkling_text
instructblip opt
instructblipvideo opt
interns1 qwen3
internvl qwen2
janus llama
kimi_k25 kimi_k2
kimi_k3 kimi_linear
kimi_vl deepseek_v3
kosmos-2 kosmos_2_text_model
kosmos-2.5 kosmos_2_5_text_model
lfm2_vl lfm2
lighton_ocr qwen3
lightonocr qwen3
llama4 llama4_text
llava llama
llava_next llama
llava_next_video llama
llava_onevision qwen2
minicpmv4_6 qwen3_5_text
minicpmv4_7 qwen3_5_text
minimax_m3_vl minimax_m3_vl_text
mistral3 mistral
molmo2 molmo2_text
mllama mllama_text_model
moss_transcribe_diarize qwen3
muse_glimmer muse_glimmer_text
musicflamingo qwen2
nemotron_h_omni nemotron_h
ovis2 qwen2
paddleocr_vl paddleocr_vl_text
paligemma gemma
perception_lm llama
pp_chart2table qwen2
qianfan_ocr qwen3
qwen2_audio qwen2
qwen3_5 qwen3_5_text
qwen3_5_moe qwen3_5_moe_text
qwen3_asr qwen3
qwen3_vl qwen3_vl_text
qwen3_vl_moe qwen3_vl_moe_text
qwen4_exp qwen4_exp_text
shieldgemma2 gemma3_text
smolvlm llama
step3_vl step3_text
step3p7 step3p5
ultravox llama
vibevoice qwen2
vibevoice_asr qwen2
video_llama_3 qwen2
video_llava llama
vipllava llama
voxtral llama
"""
"""Models with a `text_config`, and the type that it has where it names none (transformers 5.20, vLLM 0.33)."""

WRAPPERS = {
    **{outer: Wrapper(inner) for outer, inner in (line.split() for line in TEXT.strip().splitlines())},
    "internvl_chat": Wrapper("", ("llm_config",)),
    "skywork_chat": Wrapper("", ("llm_config",)),
    "Llama_Nemotron_Nano_VL": Wrapper("", ("llm_config",)),
    "NemotronH_Nano_VL_V2": Wrapper("nemotron_h", ("llm_config",)),
    "eagle_2_5_vl": Wrapper(""),
    "dots_ocr": Wrapper("qwen2", flat=True),
    "Keye": Wrapper("qwen3", flat=True),
    "KeyeVL1_5": Wrapper("qwen3", flat=True),
    "phi3_v": Wrapper("phi3", flat=True),
    "phi4mm": Wrapper("phi3", flat=True),
    "h2ovl_chat": Wrapper("", ("llm_config",)),
    "NVLM_D": Wrapper("", ("llm_config",)),
    "ovis": Wrapper("", ("llm_config",)),
    "ovis2_5": Wrapper("", ("llm_config",)),
    "deepseek_vl_v2": Wrapper("deepseek_v2", ("language_config",)),
    "qwen2_vl": Wrapper("qwen2_vl_text", flat=True),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", flat=True),
    "qwen2_5_omni": Wrapper("qwen2_5_omni_text", ("thinker_config", "text_config")),
    "qwen2_5_omni_thinker": Wrapper("qwen2_5_omni_text"),
    "qwen3_omni_moe": Wrapper("qwen3_omni_moe_text", ("thinker_config", "text_config")),
    "qwen3_omni_moe_thinker": Wrapper("qwen3_omni_moe_text"),
}

INERT = words(
    """
    _pad_token_id adapter_config assistant_token_id audio_bos_token_id audio_config audio_encoder_config
    audio_end_token_id audio_eos_token_id audio_start_token_id audio_token_id audio_token_index boa_token_id
    boi_token_id boi_token_index code2wav_config decoder_only downsample_factor downsample_mode downsample_rate
    downsample_ratio dynamic_image_size enable_audio_output encoder_config eoa_token_id eoa_token_index
    eoi_token_id eoi_token_index frame_end_token_id frame_start_token_id has_lora_adapter hidden_size
    im_end_token_id im_start_token_id image_end_token_id image_grid_pinpoints image_seq_length image_size
    image_start_token_id image_token_id image_token_index insert_layer_id latent_query_num
    low_res_image_start_token_id media_placeholder_token_id merge_kernel_size merger_times mm_tokens_per_image
    multimodal_projector_bias num_image_tokens num_query_tokens patch_size position_id_per_seconds projection_dim
    projector_bias projector_config projector_hidden_act projector_hidden_size qformer_config scale_factor
    spatial_merge_size system_token_id talker_config timestamp_token_id token2wav_config tts_bos_token_id
    tts_eos_token_id tts_pad_token_id use_decoder_only_language_model use_image_newline_parameter user_token_id
    video_config video_end_token_id video_seq_length video_start_token_id video_token_id video_token_index
    vision_config vision_end_token_id vision_feature_layer vision_feature_select_strategy
    vision_soft_tokens_per_image vision_start_token_id vision_token_id vq_config window_size
    """
)
"""Fields around a decoder on which its cache does not depend: encoders, projectors, marks in the text."""

TILES = """
    dynamic_image_size force_image_size max_dynamic_patch min_dynamic_patch pad2square ps_version select_layer template
    use_backbone_lora use_llm_lora use_thumbnail system_message vit_hidden_size vision_model
    """
"""Fields that InternVL and its kin cut images by."""

BY_TYPE = {
    **dict.fromkeys(
        ("internvl_chat", "skywork_chat", "h2ovl_chat", "NVLM_D", "Llama_Nemotron_Nano_VL", "NemotronH_Nano_VL_V2"),
        TILES,
    ),
    "aria": "max_value_projector_patch_to_query_dict projector_patch_to_query_dict",
    "aya_vision": "adapter_layer_norm_eps",
    "blip-2": "image_text_hidden_size",
    "cohere2_vision": "alignment_intermediate_size",
    "deepseek_vl_hybrid": "high_res_vision_config",
    "deepseek_vl_v2": "candidate_resolutions global_view_pos tile_tag",
    "diffusion_gemma": "canvas_length",
    "emu3": "vocabulary_map",
    "fun_asr_nano": "adaptor_config",
    "fuyu": "num_channels",
    "gemma3n": "audio_soft_tokens_per_image",
    "granite4_vision": "deepstack_layer_map projector_dropout spatial_target_layers spatial_vision_layer",
    "hunyuan_vl": "im_end_id im_newline_id im_start_id",
    "idefics2": "perceiver_config",
    "inkling_mm_model": "image_bos_token_id mtp_config",
    "kimi_k25": "projection_hidden_size projection_layer_norm_eps use_unified_vision_chunk video_placeholder",
    "kimi_k3": "image_placeholder",
    "lfm2_vl": """
        do_image_splitting encoder_patch_size max_image_tokens max_pixels_tolerance max_tiles min_image_tokens
        min_tiles projector_use_layernorm tile_size use_image_special_tokens use_thumbnail
        """,
    "llava_next_video": "spatial_pool_mode spatial_pool_stride",
    "llava_onevision": "vision_aspect_ratio",
    "minicpmv4_6": "drop_vision_last_layer",
    "minicpmv4_7": "image_end_id image_start_id newline_id slice_end_id slice_start_id",
    "minimax_m3_vl": "img_token_compression_config merged_hidden_size num_reward_heads process_image_mode",
    "molmo2": "image_patch_id",
    "moss_transcribe_diarize": "audio_chunk_size audio_merge_size",
    "muse_glimmer": "out_hidden_size",
    "musicflamingo": "audio_frame_step head_dim max_position_embeddings",
    "nemotron_h_omni": "force_image_size video_pruning_rate video_temporal_patch_size vision_hidden_size",
    "ovis": """
        conversation_formatter_class disable_tie_weight llm_attn_implementation multimodal_max_length
        visual_tokenizer_config
        """,
    "ovis2": "visual_indicator_token_ids",
    "ovis2_5": """
        conversation_formatter_class disable_tie_weight llm_attn_implementation multimodal_max_length
        visual_vocab_size vit_config
        """,
    "perception_lm": "projector_pooling_ratio vision_use_cls_token",
    "phi3_v": "embd_layer img_processor num_img_tokens",
    "phi4mm": "audio_processor embd_layer img_processor speech_lora vision_lora",
    "qwen2_5_omni_thinker": "seconds_per_chunk",
    "qwen3_5": "language_model_only",
    "qwen3_5_moe": "language_model_only",
    "qwen3_asr": "token_classification_bias",
    "vibevoice": "diffusion_head_config diffusion_loss_weight semantic_model_config",
    "vibevoice_asr": """
        acoustic_tokenizer_chunk_size acoustic_tokenizer_encoder_config semantic_tokenizer_encoder_config
        """,
    "vipllava": "projector_layernorm_eps vision_feature_layers",
}
"""Such fields of single models (transformers 5.20)."""

LAYER_LIST = "layer_list"
"""The `model_type` of layers that are listed by hand."""

ARCHITECTURES = {"LongcatFlashForCausalLM": "longcat_flash", "Mistral3ForConditionalGeneration": "mistral3"}
"""Types of models by architecture, for files without a `model_type` (vLLM 0.33 `_ARCHITECTURE_TO_MODEL_TYPE`)."""


def type_of(config: Mapping[str, Any]) -> str:
    """The `model_type`, or the one that a list of layers, or an architecture, has without it.

    Raises:
      ConfigError: there is none.
    """
    model_type = config.get("model_type")
    if model_type is None and isinstance(config.get("layers"), list):
        return LAYER_LIST
    if model_type is None:
        for architecture in config.get("architectures") or ():
            if architecture in ARCHITECTURES:
                return ARCHITECTURES[architecture]
    if not isinstance(model_type, str):
        raise ConfigError("model_type", model_type, "the name of a type of model")
    return model_type
