"""Caches of each public model: totals derived by hand, the field responsible for each byte, nested configs."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import math
import operator
import pathlib
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import ConfigError, FileError, HKVError
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model
from hkv.spec import FullAttention, Mamba, MLAAttention, SlidingWindow, SlidingWindowMLA

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
DERIVATIONS = json.loads((FOLDER.parent / "model_totals.json").read_text())
CONFIGS = {name: load_config(FOLDER / f"{name}.json") for name in DERIVATIONS}


@pytest.mark.parametrize("name", DERIVATIONS)
def test_totals_are_those_derived_by_hand(name: str) -> None:
    model = read_model(CONFIGS[name])
    assert model.token_bytes == evaluate(DERIVATIONS[name]["per_token"])
    assert model.resident_bytes == evaluate(DERIVATIONS[name]["per_sequence"])


def test_every_recorded_config_has_a_derivation() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(DERIVATIONS)


@pytest.mark.parametrize("name", DERIVATIONS)
def test_shared_values_read_like_the_recorded_ones(name: str, shared_dir: pathlib.Path) -> None:
    assert read_model(load_config(shared_dir / "models" / f"{name}.json")) == read_model(CONFIGS[name])


@pytest.mark.parametrize("name", DERIVATIONS)
def test_a_nested_config_reads_like_its_decoder(name: str) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if key != "torch_dtype"}
    outer = {"model_type": "internvl_chat", "llm_config": config, "torch_dtype": "bfloat16"}
    nested, plain = read_model(outer), read_model(CONFIGS[name])
    assert nested.specs == plain.specs
    for layer in nested.layers:
        assert all(field == "torch_dtype" or field.startswith("llm_config.") for field in layer.governed_by)


def changed_layers(before: Model, after: Model) -> set[str]:
    old, new = before.specs, after.specs
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def with_field(config: dict, path: str, value: object) -> dict:
    config = copy.deepcopy(config)
    *parents, last = path.replace("]", "").replace("[", ".").split(".")
    place = config
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    place[int(last) if isinstance(place, list) else last] = value
    return config


def field_paths(config: dict) -> list[tuple[str, int]]:
    """Every integer field, those in nested objects included, and its value."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += [(f"{key}.{path}", inner) for path, inner in field_paths(value)]
        elif type(value) is int and value > 0:
            found.append((key, value))
    return found


COUNTS_OF_LAYERS = {"num_hidden_layers", "num_kv_shared_layers", "attn_layer_period", "attn_layer_offset"}


@given(data=st.data(), name=st.sampled_from(sorted(DERIVATIONS)))
def test_changing_a_field_changes_exactly_the_layers_it_governs(data: st.DataObject, name: str) -> None:
    config = CONFIGS[name]
    paths = [(path, value) for path, value in field_paths(config) if path not in COUNTS_OF_LAYERS]
    path, value = data.draw(st.sampled_from(paths))
    factor = data.draw(st.sampled_from((2, 3)))
    before = read_model(config)
    try:
        after = read_model(with_field(config, path, value * factor))
    except HKVError:
        assert any(path in layer.governed_by for layer in before.layers), f"{path} refused but governs nothing"
        return
    assert changed_layers(before, after) == {layer.name for layer in before.layers if path in layer.governed_by}


BY_LAYER_TYPES = sorted(n for n, c in CONFIGS.items() if "layer_types" in c and n not in ("gpt_oss", "llama4_text"))
"""Models whose layers are what `layer_types` says; vLLM does not read gpt-oss's and Llama 4's."""


@given(data=st.data(), name=st.sampled_from(BY_LAYER_TYPES))
def test_changing_one_layer_type_changes_that_layer(data: st.DataObject, name: str) -> None:
    config = CONFIGS[name]
    kinds = sorted(set(config["layer_types"]))
    if len(kinds) < 2 or config.get("num_kv_shared_layers"):
        return
    index = data.draw(st.integers(0, len(config["layer_types"]) - 1))
    other = data.draw(st.sampled_from([kind for kind in kinds if kind != config["layer_types"][index]]))
    before, after = read_model(config), read_model(with_field(config, f"layer_types[{index}]", other))
    changed = {int(layer.split(".")[1]) for layer in changed_layers(before, after)}
    governed = {layer.index for layer in before.layers if f"layer_types[{index}]" in layer.governed_by}
    assert changed == governed == {index}


@pytest.mark.parametrize("name", DERIVATIONS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tensor_parallel_ranks_share_or_replicate_heads(name: str, ranks: int) -> None:
    whole, part = read_model(CONFIGS[name]), read_model(CONFIGS[name], ReadOptions(tensor_parallel=ranks))
    for layer, spec in part.specs.items():
        old = whole.specs[layer]
        if isinstance(old, MLAAttention | SlidingWindowMLA):
            assert spec == old
        elif isinstance(old, FullAttention | SlidingWindow) and isinstance(spec, FullAttention | SlidingWindow):
            assert spec.num_kv_heads == max(1, old.num_kv_heads // ranks)
        elif isinstance(old, Mamba):
            assert old.unpadded_page_size_bytes // ranks <= spec.unpadded_page_size_bytes


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads = 8"):
        read_model(CONFIGS["mistral"] | {"num_attention_heads": 24}, ReadOptions(tensor_parallel=3))


def test_gemma3n_shares_the_last_cache_of_its_kind() -> None:
    layers = read_model(CONFIGS["gemma3n_text"]).layers
    kinds = CONFIGS["gemma3n_text"]["layer_types"]
    assert {layer.shares for layer in layers[:20]} == {None}
    for layer in layers[20:]:
        expected = "layers.19" if kinds[layer.index] == "full_attention" else "layers.18"
        assert (layer.spec, layer.shares) == (None, expected)


def test_lfm2_as_transformers_saves_it_has_convolutions_of_the_hidden_size() -> None:
    """`Lfm2Config.save_pretrained` of transformers 5.20 writes no `conv_dim`, which the released files have."""
    kinds = ["conv", "conv", "full_attention", "conv"]
    saved = {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "full_attn_idxs": None,
        "hidden_size": 64,
        "layer_types": kinds,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
    }
    model, released = read_model(saved), read_model(saved | {"conv_dim": 64})
    assert model.specs == released.specs
    assert [spec.shapes for spec in model.specs.values() if isinstance(spec, Mamba)] == [((2, 64),)] * 3
    assert "conv_dim = 64, from hidden_size: the file has none" in model.notes
    assert read_model(saved | {"conv_dim": 96}).specs["layers.0"] != model.specs["layers.0"]


def test_unknown_type_is_refused_with_the_nearest_family() -> None:
    config = CONFIGS["jamba"] | {"model_type": "brand_new"}
    with pytest.raises(ConfigError, match=r"model_type = 'brand_new'.*Jamba \(jamba\) is nearest"):
        read_model(config)


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("gpt_oss", "layer_types[3]", "spiral_attention", r"layer_types\[3\] = 'spiral_attention'"),
        ("llama", "num_key_value_heads", -1, "num_key_value_heads = -1"),
        ("llama", "num_hidden_layers", "many", "num_hidden_layers = 'many'"),
        (
            "deepseek_v4",
            "compress_rates.heavily_compressed_attention",
            7,
            "compress_rates.heavily_compressed_attention",
        ),
        ("gpt_oss", "num_hidden_layers", 35, "layer_types = 36"),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, field: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model(with_field(CONFIGS[name], field, value))


def test_files_that_are_no_config(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FileError, match="a JSON object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match="JSON"):
        load_config(tmp_path)
    with pytest.raises(FileError, match="readable"):
        load_config(tmp_path / "absent.json")


def test_fields_are_refused_with_their_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "nan.json"
    file.write_text(json.dumps(CONFIGS["llama"] | {"num_hidden_layers": math.nan}))
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))}: num_hidden_layers = nan: expected an integer"):
        read_model(load_config(file))
    file.write_text('{"model_type": "nobody"}')
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))}: model_type = 'nobody'"):
        read_model(load_config(file))


def test_other_spellings_of_the_same_model() -> None:
    nemotron = {k: v for k, v in CONFIGS["nemotron_h"].items() if k != "layers_block_type"}
    assert read_model(nemotron | {"hybrid_override_pattern": "ME*-"}).specs == read_model(CONFIGS["nemotron_h"]).specs
    gemma = {k: v for k, v in CONFIGS["gemma3_text"].items() if k != "layer_types"}
    assert read_model(gemma | {"sliding_window_pattern": 6}).specs == read_model(CONFIGS["gemma3_text"]).specs
    kimi = {k: v for k, v in CONFIGS["kimi_linear"].items() if not k.startswith(("layer_types", "linear_"))}
    linear = {"full_attn_layers": [5, 9, 13, 17, 21, 25], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
    assert read_model(kimi | {"linear_attn_config": linear}).specs == read_model(CONFIGS["kimi_linear"]).specs


@given(
    data=st.data(),
    name=st.sampled_from(sorted(DERIVATIONS)),
    value=st.sampled_from((None, -1, 0, 1.5, "many", [], {}, [1], {"a": 1}, True, [None] * 3, 10**9)),
)
def test_strange_values_are_read_or_refused_never_a_crash(data: st.DataObject, name: str, value: object) -> None:
    config = copy.deepcopy(CONFIGS[name])
    config[data.draw(st.sampled_from(sorted(config)))] = value
    with contextlib.suppress(HKVError):
        read_model(config)


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(text: str) -> Fraction:
    """The value of a sum."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp), ast.dump(node)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)
