"""Fields of configs that no byte of a cache depends on."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from hkv.model.huggingface import families, wrappers
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.longest import LENGTHS

INERT = words(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
    architectures attn_implementation auto_map compression_config custom_pipelines dtype model_type
    quantization_config tf_legacy_loss torch_dtype torchscript transformers_version unsloth_fixed unsloth_version
    use_bfloat16

    bad_words_ids bos_token_id cls_token_id decoder_start_token_id eod_token_id eos_token_id forced_bos_token_id
    forced_eos_token_id mask_token_id pad_token_id prefix sep_token_id tokenizer_class tokenizer_model_max_length
    unk_token_id vocab_size vocab_size_per_layer_input

    begin_suppress_tokens chunk_size_feed_forward classifier_dropout diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task generation_config id2label
    inference_mode label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_logits_to_keep num_return_sequences output_attentions output_hidden_states output_scores pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature top_k top_p typical_p use_cache

    layer_rope_theta original_max_position_embeddings partial_rotary_factor rope_interleave rope_local_base_freq
    rope_parameters rope_partial_factor rope_ratio rope_scaling rope_theta rotary_dim rotary_emb_base rotary_pct
    rotary_percentage use_mrope

    aux_loss_alpha aux_loss_coef ep_size expert_dropout expert_dtype expert_layer_offset expert_layer_period
    experts_per_token ffn_dim first_k_dense_replace intermediate_size mlp_bias mlp_layer_types mlp_only_layers
    moe_dtype moe_intermediate_dim moe_intermediate_size moe_k moe_layer_end_index moe_layer_freq
    moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts moe_num_shared_experts moe_router_dtype
    moe_topk n_group n_routed_experts n_shared_experts norm_topk_prob num_dense_layers num_experts
    num_experts_per_tok num_experts_per_token num_local_experts num_shared_experts output_router_logits
    routed_scaling_factor router_aux_loss_coef router_jitter_noise router_z_loss_coef scoring_func seq_aux
    shared_expert_intermediate_size shared_intermediate_size swiglu_alpha swiglu_limit swiglu_limits
    swiglu_limits_shared top_k_experts topk_group topk_method use_double_wide_mlp

    mtp_layer_types mtp_loss_scaling_factor mtp_mlp_layer_types num_mtp_layers num_nextn_predict_layers

    chunk_size conv_bias mamba_conv_bias mamba_proj_bias rescale_prenorm_residual residual_in_fp32 time_step_floor
    time_step_init_scheme time_step_limit time_step_max time_step_min time_step_rank time_step_scale
    use_associative_scan use_conv_bias use_mamba_kernels use_mambapy

    activation_dropout activation_function attention_bias attention_dropout attention_multiplier
    attention_output_gate attention_probs_dropout_prob attn_bias attn_dropout attn_logit_softcapping
    attn_output_gate attn_pdrop clip_qkv decoder_sparse_step dropout embd_pdrop embedding_dropout
    embedding_multiplier final_logit_softcapping fuse_qkv gate hidden_act hidden_activation hidden_dropout
    hidden_dropout_prob hidden_size_per_layer_input ignore_index initializer_factor initializer_range
    layer_norm_eps layer_norm_epsilon layerdrop layernorm_epsilon lm_head_bias logit_scale logits_scaling
    model_max_length mtp_hybrid_override_pattern mtp_num_hidden_layers mtp_use_dedicated_embeddings n_inner
    norm_eps norm_type num_codebooks num_mtp_modules output_gate_type parallel_residual q_lora_rank qk_head_dim
    qk_layernorm qk_norm_type qkv_bias qkv_fused query_pre_attn_scalar reorder_and_upcast_attn resid_pdrop
    residual_dropout residual_multiplier rms_norm_eps route_norm route_scale scale_attn_by_inverse_layer_idx
    scale_attn_weights score_correction_bias score_func sequence_parallel tie_embedding tie_encoder_decoder
    tie_word_embeddings use_bias use_gemma_norm use_parallel_residual use_qk_norm use_rmsnorm use_routing_bias
    z_loss_coefficient
    """
)
"""Of every family, unless it declares one as deciding. By paragraphs: the file itself; tokens; training, generation and
outputs; rotary positions (`longest` reads how they are scaled); experts and feed-forward layers; layers that predict
further tokens; recurrent layers; norms, biases, activations and scales."""

ONLY = {
    "add_cross_attention": False,
    "is_causal": True,
    "is_decoder": None,
    "is_encoder_decoder": False,
    "use_bidirectional_attention": False,
}
"""Fields of every family that are inert at this value; None stands for any truth value. At another, layers are added
or keep no cache."""

BY_FAMILY = {
    "afmoe": "mup_enabled",
    "bailing_hybrid": "linear_conv_kernel_dim linear_head_dim linear_num_heads moe_renormalize num_expert_group",
    "biogpt": "scale_embedding",
    "bloom": "apply_residual_connection_post_layernorm slow_but_exact",
    "cohere2_moe": "expert_selection_fn prefix_dense_intermediate_size shared_expert_combination_strategy",
    "cohere_compass_text": "head_dim pooling",
    "ctrl": "dff",
    "deepseek_v4": "hc_eps hc_mult hc_sinkhorn_iters",
    "doge": "is_moe keep_window_size",
    "exaone4_5_text": "_num_mtp_layers mtp_share_layers",
    "falcon_h1": """
        attention_in_multiplier attention_out_multiplier key_multiplier layer_types lm_head_multiplier
        mamba_chunk_size mamba_norm_before_gate mamba_rms_norm mlp_multipliers projectors_bias
        ssm_in_multiplier ssm_multipliers ssm_out_multiplier
        """,
    "falcon_mamba": "mixer_rms_eps",
    "gemma": "use_bidirectional_attention",
    "gemma2": "cache_implementation sliding_window_size use_bidirectional_attention",
    "gemma3_text": "attn_logit_softcapping cache_implementation",
    "gemma3n_text": """
        activation_sparsity_pattern altup_active_idx altup_coef_clip altup_correct_scale altup_num_inputs
        laurel_rank
        """,
    "gemma4_text": "enable_moe_block",
    "gpt_bigcode": "attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
    "gpt_oss": "initial_context_length",
    "hunyuan_vl_text": "attention_head_dim org_vocab_size pad_id",
    "hy_v3": """
        enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine expert_hidden_dim
        moe_router_enable_expert_bias moe_router_use_sigmoid router_scaling_factor
        """,
    "hyperclovax": "use_post_norm",
    "internlm2": "bias",
    "jamba": "mamba_dt_rank",
    "kimi_k2": "num_experts_per_token",
    "kimi_linear": """
        activation_situ_beta activation_situ_linear_beta attn_res_block_size latent_moe_use_norm
        num_experts_per_token routed_expert_hidden_size
        """,
    "kyutai_speech_to_text": "audio_bos_token_id audio_pad_token_id codebook_vocab_size codec_config frame_size",
    "laguna": """
        gating moe_apply_router_weight_on_input moe_routed_scaling_factor moe_router_logit_softcapping
        num_attention_heads_per_layer
        """,
    "lfm2": """
        block_auto_adjust_ff_dim block_dim block_ff_dim block_ffn_dim_multiplier block_mlp_init_scale
        block_multiple_of block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init
        conv_dim_out conv_use_xavier_init num_heads use_pos_enc
        """,
    "lfm2_moe": "use_expert_bias",
    "llama4_text": """
        attn_scale attn_temperature_tuning floor_scale interleave_moe_layer_step intermediate_size_mlp
        moe_layers
        """,
    "longcat_flash": "expert_ffn_hidden_size ffn_hidden_size",
    "minicpm": "dim_model_base scale_depth scale_emb",
    "minimax_m2": "attn_type_list max_model_len mtp_transformer_layers qk_norm_type use_mtp",
    "mllama_text_model": "cross_attention_layers",
    "modernbert-decoder": """
        classifier_activation classifier_bias decoder_bias initializer_cutoff_factor mlp_dropout norm_bias
        sliding_window
        """,
    "molmo2_text": "additional_vocab_size norm_after rope_scaling_layers",
    "moshi": "audio_encoder_config audio_vocab_size depth_decoder_config",
    "muse_glimmer_text": "output_multiplier post_norm_eps qk_scale_factor",
    "nemotron_h": """
        attention_head_dim mamba_hidden_act mlp_hidden_act moe_latent_size moe_shared_expert_intermediate_size
        moe_shared_expert_overlap mtp_layers_block_type
        """,
    "olmo_hybrid": """
        linear_a_log_max linear_a_log_min linear_allow_neg_eigval linear_dt_init_floor linear_dt_max
        linear_dt_min
        """,
    "opt": """
        _remove_final_layer_norm do_layer_norm_before enable_bias init_std layer_norm_elementwise_affine
        word_embed_proj_dim
        """,
    "phi3": "full_attn_mod interpolate_factor",
    "phi4_multimodal": "audio_config vision_config",
    "phimoe": "input_jitter_noise lm_head_bias",
    "qwen2_moe": "max_window_layers",
    "qwen3_moe": "max_window_layers",
    "qwen4_exp_text": """
        indexer_budget indexer_compress_ratio indexer_head_dim indexer_kv_heads indexer_n_heads
        number_of_conv_states
        """,
    "seed_oss": "attention_out_bias",
    "stablelm": "use_qkv_bias",
    "starcoder2": "attention_softmax_in_fp32 mlp_type norm_epsilon scale_attention_softmax_in_fp32",
    "step3p5": "moe_router_scaling_factor moe_top_k per_layer_config share_expert_dim share_expert_dims",
    "youtu": "embedding_initializer_range",
    "zamba2": """
        adapter_rank add_bias_linear kv_channels num_mem_blocks num_query_groups use_mem_eff_path use_mem_rope
        use_shared_attention_adapter
        """,
}
"""Of single families, beside what those declare themselves: the rest of their config classes (transformers 5.20)."""


# Names of fields that HKV knows: of each family, around a decoder, and of all files.

DRAFT = words(
    """draft_vocab_size target_hidden_size eagle_config eagle_aux_hidden_state_layer_ids norm_before_residual
    num_aux_hidden_states"""
)
"""Fields of draft modules on which their cache does not depend."""

DERIVED = {"head_dim": Fields.head_dim, "num_key_value_heads": Fields.kv_heads}
"""Fields that some families derive from others: a file may repeat them, with the same value."""

LEAST_TELLING = 2
"""Deciding fields of an encoder: to be near one says nothing."""


@functools.cache
def known_families() -> Mapping[str, Family]:
    """Every family by `model_type`."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        found |= importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
    return found


def own_fields(model_type: str) -> frozenset[str]:
    """Every field that a family declares, those of all families not counted."""
    return known_families()[model_type].known | words(BY_FAMILY.get(model_type, ""))


def known_inside(fields: Fields) -> frozenset[str]:
    """Every field that a decoder's config may have, whatever its value."""
    known = own_fields(fields.model_type) | INERT | frozenset(ONLY) | frozenset(LENGTHS)
    whole = fields.values.get("model_type", fields.model_type)
    if fields.path or fields.model_type != whole:
        known |= wrappers.INERT  # a wrapper's marks may be repeated inside, and in a flat config all stand together
    return known if fields.path else known | words(wrappers.BY_TYPE.get(str(whole), ""))


def known_around(model_type: str) -> frozenset[str]:
    """Every field that may stand around a decoder's config, whatever its value."""
    own = words(wrappers.BY_TYPE.get(model_type, "")) | {wrappers.WRAPPERS[model_type].keys[0]}
    return INERT | frozenset(ONLY) | wrappers.INERT | own


def nearest_family(config: Mapping[str, Any], name: str | None = None) -> str:
    """The family that declares most of a config's fields, by its name and `model_type`.

    Args:
      config: the decoder's fields.
      name: a field that it must declare; None for any family.
    """
    known = known_families()
    cached = {key: family for key, family in known.items() if len(family.fields) > LEAST_TELLING}
    able = {key: family for key, family in cached.items() if name is None or name in own_fields(key)} or cached

    def distance(key: str) -> tuple[int, str]:
        unexplained = config.keys() - own_fields(key) - INERT
        return len(unexplained) + len(able[key].fields.keys() - config.keys()), key

    best = min(able, key=distance)
    return f"{able[best].name} ({best})"


# Models that are refused by name: those that vLLM dropped, and those whose caches HKV has no kind for.

SINCE = {
    "0.9.2": "phi3small",
    "0.10.2": "motif phi4flash",
    "0.22.0": "jais",
    "0.23.0": "xverse bamba minimax minimax_text_01 minimax_m1 baichuan qwen internlm",
    "0.24.0": "aquila grok-1",
    "0.25.0": "telechat",
    "0.26.0": "plamo2 ouro",
    "0.28.0": "arctic chameleon mpt",
}
"""Last version that served the types (vLLM 0.33 `_PREVIOUSLY_SUPPORTED_MODELS`)."""

DROPPED = {name: version for version, names in SINCE.items() for name in words(names)}
"""The last version of vLLM that served each."""

BORROWING = words("gemma4_assistant gemma4_unified_assistant")
"""Draft modules that cache nothing: every layer reads the caches of the model that they draft for."""
