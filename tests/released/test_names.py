"""Names of variants, of quantized weights and of copies: each finds its model, and none is taken for another."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

import hkv
from hkv.dialects.vllm.planning.engine_options import EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.weights import weights_of
from hkv.errors import FileError, PlanError
from hkv.model.huggingface import load_config, read_model
from hkv.model.released import COPIES, MARKS, find, near, released_models, resolve, variants

POPULAR = """
meta-llama/Llama-3.1-8B-Instruct llama-3.1-8b
meta-llama/Meta-Llama-3.1-70B-Instruct llama-3.1-70b
RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic llama-3.1-8b
hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 llama-3.1-70b
unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit llama-3.1-8b
unsloth/Qwen3-8B-unsloth-bnb-4bit qwen3-8b
RedHatAI/Qwen3-30B-A3B-quantized.w4a16 qwen3-30b-a3b
Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 qwen2.5-7b
Qwen/Qwen3-32B-AWQ qwen3-32b
TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ mixtral-8x7b
deepseek-ai/DeepSeek-R1-Distill-Llama-70B llama-3.3-70b
deepseek-ai/DeepSeek-R1-0528 deepseek-v3
meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8 llama-4-maverick
zai-org/GLM-4.5-FP8 glm-4.5
unsloth/gpt-oss-20b-BF16 gpt-oss-20b
google/gemma-3-27b-pt gemma-3-27b
mistralai/Mistral-7B-Instruct-v0.2 mistral-7b-v0.3
"""


@pytest.mark.parametrize("line", POPULAR.strip().splitlines())
def test_a_popular_name_finds_its_model_and_says_so(line: str) -> None:
    name, expected = line.split()
    found = resolve(name)
    assert found is not None
    assert found.model.name == expected
    own = found.model.config()
    assert {**found.config, "quantization_config": None} == {**own, "quantization_config": None}
    assert name in found.note
    assert expected in found.note
    assert found.note in read_model(load_config(name)).notes


def test_a_variant_may_have_another_longest_request() -> None:
    name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    distil, own = read_model(load_config(name)), read_model(load_config("qwen2.5-32b"))
    assert (distil.max_model_len, own.max_model_len) == (131072, 32768)
    assert distil.specs == own.specs
    assert any("131,072" in note for note in distil.notes)
    assert not own.notes
    for base in ("Qwen/Qwen2.5-7B", "unsloth/Qwen2.5-7B-bnb-4bit"):
        assert read_model(load_config(base)).max_model_len == 131072, "not that of HKV's name, the tuned model"
    assert read_model(load_config("qwen2.5-7b-awq")).max_model_len == 32768


def test_the_variants_are_repositories_that_no_released_model_has() -> None:
    repositories = [name for name in variants() if "/" in name]
    assert len(repositories) > 150
    assert all(name.count("/") == 1 for name in repositories)
    assert not [name for name in repositories if find(name)]
    for name in repositories:
        (model, longest), found = variants()[name], resolve(name)
        assert found is not None
        assert found.model is model
        read = read_model(found.config)
        assert longest in (None, read.max_model_len)


def test_marks_of_quantized_weights_come_off_all_names_of_their_own_organisation_or_of_copies() -> None:
    for model in released_models():
        if model.ids[0].lower().startswith(("nvidia/", "amd/")):
            continue
        name = model.ids[0]
        found = resolve(f"{name}-GPTQ-Int4")
        assert found is not None
        assert found.model.name == model.name
        copy = resolve(f"unsloth/{name.partition('/')[2]}-unsloth-bnb-4bit")
        assert copy is not None
        assert copy.model.name == model.name
        assert resolve(f"nobody/{name.partition('/')[2]}") is None, "whose values those are is not known"
    assert "unsloth" in COPIES
    assert MARKS.search("x-awq")


def test_checkpoints_that_pack_the_cache_are_not_taken_for_others() -> None:
    assert resolve("nvidia/Llama-3.1-8B-Instruct-FP8") is None
    with pytest.raises(FileError, match=r"llama-3\.1-8b.*--kv-cache-dtype fp8"):
        load_config("nvidia/Llama-3.1-8B-Instruct-FP8")


def test_near_names_are_of_the_family_by_size() -> None:
    assert near("llama-3.1-9b")[0] == "llama-3.1-8b"
    assert near("meta-llama/Llama-3.1-90B")[0] == "llama-3.1-70b"
    assert near("qwen3-7b")[0] == "qwen3-8b"
    assert near("mistral-8b")[0] == "mistral-7b-v0.3"


def snapshot(cache: pathlib.Path, name: str, revision: str, config: object) -> pathlib.Path:
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_cache_of_hugging_face_goes_before_released_models(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, config = "meta-llama/Llama-3.1-8B-Instruct", load_config("llama-3.1-8b") | {"num_hidden_layers": 4}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = snapshot(tmp_path, name, "0123456789abcdef", config)
    assert load_config(name) == config
    assert load_config(folder.parent.parent) == config, "the repository's folder in the cache"
    model = hkv.read_model(name)
    assert model.num_layers == 4
    assert model.notes == ("config of snapshot 0123456789ab in the Hugging Face cache",)
    snapshot(tmp_path, name, "fedcba", config | {"num_hidden_layers": 5})
    with pytest.raises(FileError, match="refs/main"):
        load_config(name)
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text("fedcba")
    assert load_config(name)["num_hidden_layers"] == 5
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    snapshot(tmp_path / "home" / "hub", "mine/own", "1", config)
    assert load_config("mine/own") == config


def test_a_quantized_cache_may_be_asked_for_beside_the_config(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_config("llama-3.1-8b")))
    plain = hkv.read_model(tmp_path)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert hkv.read_model(tmp_path).token_bytes * 2 == plain.token_bytes


def test_files_with_a_mark_or_a_field_named_twice(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"model_type": "llama"}')
    with pytest.raises(FileError, match="byte-order mark"):
        load_config(file)
    file.write_text('{"model_type": "llama", "head_dim": 64, "head_dim": 128}')
    with pytest.raises(FileError, match=r"head_dim = \[64, 128\]: expected a field that stands there once"):
        load_config(file)
    file.write_text('{"model_type": "llama", "head_dim": 64, "head_dim": 64}')
    assert load_config(file)["head_dim"] == 64


TYPED = """
llama3.1:8b llama-3.1-8b
llama3.1:8b-instruct-q4_K_M llama-3.1-8b
llama3.2:3b llama-3.2-3b
llama3.3 llama-3.3-70b
llama4:scout llama-4-scout
qwen3:32b qwen3-32b
qwen3:30b-a3b qwen3-30b-a3b
qwen2.5-coder:32b qwen2.5-32b
qwen3.6:27b qwen3.6-27b
qwq qwen2.5-32b
gemma3:27b gemma-3-27b
gemma3:1b gemma-3-1b
gpt-oss:latest gpt-oss-20b
gptoss120b gpt-oss-120b
GPT_OSS_20B gpt-oss-20b
deepseek-r1:70b llama-3.3-70b
deepseek-r1:671b deepseek-v3
mistral:7b mistral-7b-v0.3
mistral-nemo mistral-nemo-12b
mixtral mixtral-8x7b
phi4 phi-4
phi4-mini phi-4-mini
phi3.5 phi-3.5-mini
kimik2 kimi-k2
glm4.5 glm-4.5
qwen3-next qwen3-next-80b-a3b
codellama:34b codellama-34b
olmo2:13b olmo-2-13b
llama2 llama-2-7b
minimax-m2 minimax-m2
"""


@pytest.mark.parametrize("line", TYPED.strip().splitlines())
def test_a_name_as_people_type_it_finds_its_model(line: str) -> None:
    name, expected = line.split()
    found = resolve(name)
    assert found is not None
    assert found.model.name == expected
    assert found.note or name.lower() == expected


@pytest.mark.parametrize("name", ["qwen", "deepseek", "nemotron", "whisper", "qwen3-coder", "llama", "glm5_next"])
def test_a_name_of_several_models_is_refused_with_names_near_to_it(name: str) -> None:
    assert resolve(name) is None
    with pytest.raises(FileError, match="a released model, such as"):
        load_config(name)


def test_llama_3_has_its_own_longest_request() -> None:
    assert read_model(load_config("llama3:8b")).max_model_len == 8192
    assert read_model(load_config("llama3.1:8b")).max_model_len == 131072


PACKINGS = """
Qwen/Qwen3-32B-AWQ 0.25 0.34
Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4 0.25 0.34
Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8 0.5 0.58
RedHatAI/Qwen3-30B-A3B-quantized.w4a16 0.25 0.34
RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8 0.5 0.66
RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic 0.5 0.66
Qwen/Qwen3-32B-FP8 0.5 0.58
QuantTrio/Qwen3-235B-A22B-AWQ 0.25 0.34
qwen2.5-7b-awq 0.25 0.45
"""


@pytest.mark.parametrize("line", PACKINGS.strip().splitlines())
def test_a_quantized_name_is_weighed_as_it_says(line: str) -> None:
    name, least, most = line.split()
    packed, (model,) = weights_of(load_config(name))[0], [found.model for found in [resolve(name)] if found]
    plain = weights_of({**model.config(), "quantization_config": None})[0]
    assert float(least) < packed / plain < float(most)
    assert any("weighed by its name" in note for note in read_model(load_config(name)).notes)


def test_weights_by_a_name_are_those_of_the_file() -> None:
    """The packing that Qwen3-32B-AWQ's file has: 18 GiB, as its repository is large."""
    packing = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    own = {**load_config("qwen3-32b"), "quantization_config": {**packing, "modules_to_not_convert": None}}
    assert weights_of(load_config("Qwen/Qwen3-32B-AWQ")) == weights_of(own)
    assert round(weights_of(own)[0] / 2**30) == 18


UNWEIGHED = """
RedHatAI/Qwen3-32B-NVFP4 unsloth/Qwen3-8B-unsloth-bnb-4bit llama3.1:8b-instruct-q4_K_M bartowski/Qwen3-8B-GGUF
qwen3-8b-gptq-int3 mlx-community/Qwen3-32B-3bit
"""


@pytest.mark.parametrize("name", UNWEIGHED.split())
def test_a_quantized_name_that_does_not_say_its_bytes_is_not_weighed(name: str) -> None:
    options = EngineOptions(gpu_memory=79 << 30)
    with pytest.raises(PlanError, match=r"weights = '.*this part of a name does not say them"):
        plan_config(name, options)
    assert plan_config(name, dataclasses.replace(options, weights=20 << 30)).served.plan.num_blocks > 1000


def test_a_name_in_the_models_own_type_is_not_packed() -> None:
    packed, plain = weights_of(load_config("gpt-oss-20b"))[0], weights_of(load_config("unsloth/gpt-oss-20b-BF16"))[0]
    assert plain > 2.5 * packed
