"""Configs as they are published, with the values that vLLM 0.33 gave for each."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.errors import ConfigError
from hkv.model.huggingface import ReadOptions, read_model
from hkv.spec import FullAttention, SlidingWindow


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
def test_layers_that_share_an_indexer_have_none(model_type: str) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 78, "index_topk_freq": 4}
    model = read_model(config)
    indexers = [layer.index for layer in model.layers if layer.name.endswith(".indexer")]
    assert indexers == [0, 1, *range(5, 78, 4)]
    assert len(indexers) == 21
    assert model.token_bytes == 78 * 576 * 2 + 21 * 132
    types = ["full" if index in indexers else "shared" for index in range(78)]
    assert read_model(config | {"indexer_types": types}).specs == model.specs
    letters = "".join("F" if kind == "full" else "S" for kind in types)
    del config["index_topk_freq"]
    assert read_model(config | {"index_topk_pattern": letters}).specs == model.specs
    with pytest.raises(ConfigError, match=r"indexer_types\[2\] = 'shared': expected an indexer there"):
        read_model(config | {"indexer_types": types})


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0}, 2048),
        (None, 2048),
    ],
)
def test_rotary_scaling_and_the_longest_request(scaling: dict[str, Any] | None, longest: int) -> None:
    assert read_model({"model_type": "llama", "rope_scaling": scaling}).max_model_len == longest


def test_long_rope_starts_with_the_original_length() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    config = {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": scaling}
    assert read_model(config).max_model_len == 4096
    assert read_model(config | {"original_max_position_embeddings": 8192}).max_model_len == 8192


@pytest.mark.parametrize(
    ("model_type", "dtype", "served"),
    [("llama", "float32", 2), ("llama", "float16", 2), ("gemma2", "float16", 2), ("llama", None, 2)],
)
def test_models_are_served_in_two_bytes(model_type: str, dtype: str | None, served: int) -> None:
    spec = next(iter(read_model({"model_type": model_type, "torch_dtype": dtype}).specs.values()))
    assert isinstance(spec, FullAttention | SlidingWindow)
    assert spec.content_bytes == 2 * spec.head_size * served
    assert spec.dtype == ("float16" if (model_type, dtype) == ("llama", "float16") else "bfloat16")


FLOATS = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FLOATS}, 8),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, 8),
        ({"quant_method": "modelopt", "kv_cache_scheme": FLOATS}, 8),
        ({"quant_method": "modelopt", "kv_cache_scheme": FLOATS | {"dynamic": True}}, 16),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 16),
        ({"quant_method": "modelopt", "kv_cache_scheme": FLOATS | {"type": "int"}}, 16),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, 4.5),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, 8),
        ({"quant_method": "modelopt", "kv_cache_scheme": "x", "kv_cache_quant_algo": "FP8"}, 16),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "fp8_e4m3"}, 16),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, 4.5),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, 8),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, 16),
        ({"quant_method": "fp8", "kv_cache_scheme": FLOATS}, 16),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, 16),
    ],
)
def test_only_what_vllm_reads_packs_the_cache(quantization: dict[str, Any], bits: float) -> None:
    """As vLLM 0.33.0 planned two layers of Llama with these."""
    config, plain = {"model_type": "llama", "quantization_config": quantization}, read_model({"model_type": "llama"})
    model = read_model(config)
    assert model.token_bytes == plain.token_bytes * bits / 16
    assert read_model(config, ReadOptions(kv_dtype="bfloat16")).token_bytes == plain.token_bytes
    assert any("does not read it" in note for note in model.notes) == (bits == 16)


def test_a_packing_inside_a_decoder_s_part_is_read_of_one_format() -> None:
    """As vLLM 0.33.0 planned Qwen3.5 122B NVFP4, moved inside; latents do not look at compressed-tensors' schemes."""
    plain = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    for method, factor in (("modelopt", 1), ("compressed-tensors", 2)):
        packed = {"quant_method": method, "kv_cache_scheme": FLOATS}
        inside = plain | {"text_config": {"model_type": "llama", "quantization_config": packed}}
        assert read_model(inside).token_bytes * factor == read_model(plain).token_bytes
    latent = {"model_type": "deepseek_v3"}
    for method, factor in (("modelopt", 2), ("compressed-tensors", 1)):
        packed = {"quant_method": method, "kv_cache_scheme": FLOATS}
        assert (
            read_model(latent | {"quantization_config": packed}).token_bytes * factor == read_model(latent).token_bytes
        )


def test_zaya_is_read_as_the_transformers_backend_caches_it() -> None:
    """As vLLM 0.33.0 planned it with windows and without on five GPUs; files of older layers are refused."""
    plain = read_model({"model_type": "zaya"})
    windows = {"layer_types": ["hybrid", "hybrid_sliding"] * 20, "sliding_window": 4096}
    assert read_model({"model_type": "zaya"} | windows).specs == plain.specs
    assert {type(spec) for spec in plain.specs.values()} == {FullAttention}
    assert any("without states of convolutions" in note for note in plain.notes)
    with pytest.raises(ConfigError, match=r"^cca, ffn_hidden_size, kv_channels = "):
        read_model(
            {"model_type": "zaya", "num_hidden_layers": 80, "cca": True, "ffn_hidden_size": 4096, "kv_channels": 128}
        )


def test_query_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads = 20: expected a multiple of 8 tensor-parallel ranks"):
        read_model({"model_type": "glm4_moe_lite", "num_attention_heads": 20}, ReadOptions(tensor_parallel=8))


def test_fields_that_vllm_does_not_read_must_agree() -> None:
    kinds = ["full_attention", "sliding_attention"] * 18
    with pytest.raises(ConfigError, match=r"layer_types\[0\]"):
        read_model({"model_type": "gpt_oss", "layer_types": kinds})
    with pytest.raises(ConfigError, match="head_dim = 256: expected 128, which is what Qwen2 derives"):
        read_model({"model_type": "qwen2", "head_dim": 256})
    assert read_model({"model_type": "qwen2", "head_dim": 128}).specs == read_model({"model_type": "qwen2"}).specs


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("minimax", "a model that vLLM 0.33 serves: vLLM served it until 0.23.0"),
        ("bamba", "a model that vLLM 0.33 serves: vLLM served it until 0.23.0"),
        ("gemma4_unified_assistant", "a model with caches of its own: this draft module reads its target's"),
        ("no_such_model", "or its layers by hand"),
    ],
)
def test_what_is_not_read_is_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_model({"model_type": model_type})
    assert f"model_type = '{model_type}'" in str(refused.value)
    assert reason in str(refused.value)
