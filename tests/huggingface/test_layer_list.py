"""Layers listed by hand: the same caches as a family's, one line of refusal for each slip, and the template."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.errors import ConfigError, HKVError
from hkv.model.huggingface import ReadOptions, load_config, read_model
from tests.huggingface.test_models import FOLDER

FULL = {"kind": "full_attention", "kv_heads": 8, "head_dim": 128}


def listed(*layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    whole = {"model_type": "layer_list", "dtype": "bfloat16", "max_position_embeddings": 8192}
    return {**whole, "layers": [*layers], **more}


def of_gpt_oss() -> list[dict[str, Any]]:
    layer, window = {"kv_heads": 8, "head_dim": 64}, {"sliding_attention": {"window": 128}}
    kinds = load_config(FOLDER / "gpt_oss.json")["layer_types"]
    return [{"kind": kind, **layer, **window.get(kind, {})} for kind in kinds]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_list_caches_what_the_family_does(ranks: int) -> None:
    options = ReadOptions(tensor_parallel=ranks)
    config = load_config(FOLDER / "gpt_oss.json")
    assert read_model(listed(*of_gpt_oss()), options).specs == read_model(config, options).specs
    latent = {"kind": "latent", "rank": 512, "rope": 64, "count": 61}
    assert read_model(listed(latent)).specs == read_model(load_config(FOLDER / "deepseek_v3.json")).specs


def test_states_and_layers_without_a_cache() -> None:
    state = {"kind": "state", "shapes": [[3, 64], [4, 8, 8]], "dtypes": ["bfloat16", "float32"]}
    model = read_model(listed(state, {"kind": "none", "count": 2}, FULL | {"value_dim": 64}))
    assert list(model.specs) == ["layers.0", "layers.3"]
    assert (model.num_layers, model.resident_bytes, model.token_bytes) == (4, 3 * 64 * 2 + 4 * 8 * 8 * 4, 8 * 192 * 2)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"kind": "spiral"}, r"layers\[0\].kind = 'spiral'"),
        ({"kind": "full_attention", "kv_heads": 8}, r"layers\[0\].head_dim = None"),
        (FULL | {"window": 3}, r"layers\[0\].window = 3: expected one of kind, count, kv_heads, head_dim, value_dim"),
        (FULL | {"kv_heads": "8"}, r"layers\[0\].kv_heads = '8'"),
        (FULL | {"count": 0}, r"layers\[0\].count = 0"),
        (FULL | {"count": 10_001}, r"layers\[0\].count = 10001"),
        ({"kind": "state", "shapes": [[1]], "dtypes": []}, r"layers\[0\].dtypes"),
        ({"kind": "state", "shapes": [], "dtypes": []}, r"layers\[0\].shapes"),
        ({"kind": "state", "shapes": [[0]], "dtypes": ["int8"]}, r"layers\[0\].shapes = 0"),
        (3, r"layers\[0\] = 3"),
    ],
)
def test_slips_are_refused_by_their_place(layer: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model(listed(layer))


def test_a_refusal_has_a_list_to_begin_with() -> None:
    inner = {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 1024}
    for config in ({"model_type": "brand_new", **inner}, {"model_type": "brand_new", "text_config": inner}):
        with pytest.raises(ConfigError) as refusal:
            read_model(config)
        template = json.loads(str(refusal.value).partition("(--layers FILE): ")[2])
        assert template["layers"] == [{"kind": "full_attention", "count": 3, "kv_heads": 2, "head_dim": 64}]
        assert read_model(template).token_bytes == 3 * 2 * 2 * 64 * 2


def run(*line: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["plan", *line, "--memory", "8GiB", "--json", "-"])
    return result.exit_code, result.output


def test_a_file_of_layers_is_planned_as_the_config_is(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "layers.json"
    listed_by_hand = {"dtype": "bfloat16", "max_position_embeddings": 131072, "layers": of_gpt_oss()}
    path.write_text(json.dumps(listed_by_hand))
    code, output = run("--layers", str(path))
    assert (code, output) == run(str(path))
    own, known = json.loads(output), json.loads(run(str(FOLDER / "gpt_oss.json"))[1])
    assert own["startup"] == known["startup"]
    assert own["groups"] == known["groups"]
    rows = json.loads(run("--layers", str(path), "gpt-oss-20b", "--max-model-len", "4096,8192")[1])["rows"]
    assert [row["model"] for row in rows] == ["gpt-oss-20b"] * 2 + [str(path)] * 2


def test_cross_attention_by_hand() -> None:
    cross = {"kind": "cross_attention", "encoder_len": 1500, "kv_heads": 20, "head_dim": 64}
    model = read_model(listed({"kind": "full_attention", "kv_heads": 20, "head_dim": 64}, cross))
    assert (model.encoder_tokens, model.token_bytes, model.resident_bytes) == (1500, 5120, 1500 * 5120)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "llama"}, "model_type = 'llama': expected layer_list"),
        ({"num_hidden_layers": 2}, "layers = None: expected a list, such as"),
        ({"layers": []}, "layers = []: expected a list of layers"),
        ({"layers": [FULL]}, "max_position_embeddings = None"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: pathlib.Path, content: dict[str, Any], says: str) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(content))
    with pytest.raises(HKVError) as refusal:
        CliRunner().invoke(cli, ["plan", "--layers", str(path), "--memory", "8GiB"], catch_exceptions=False)
    assert says in str(refusal.value)


def test_neither_a_config_nor_layers() -> None:
    code, output = run()
    assert code == 2
    assert "--layers FILE" in output
