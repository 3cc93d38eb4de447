"""Layers listed by hand: the same caches as a family's, one line of refusal for each slip, and the template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hkv.errors import ConfigError
from hkv.model.huggingface import ReadOptions, load_config, read_model
from tests.huggingface.test_models import FOLDER

FULL = {"kind": "full_attention", "kv_heads": 8, "head_dim": 128}


def listed(*layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model_type": "layer_list",
        "dtype": "bfloat16",
        "max_position_embeddings": 8192,
        "layers": [*layers],
        **more,
    }


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_list_caches_what_the_family_does(ranks: int) -> None:
    options = ReadOptions(tensor_parallel=ranks)
    config = load_config(FOLDER / "gpt_oss.json")
    pair = [
        {"kind": kind, "kv_heads": 8, "head_dim": 64} | ({"window": 128} if kind == "sliding_attention" else {})
        for kind in config["layer_types"]
    ]
    assert read_model(listed(*pair), options).specs == read_model(config, options).specs
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
        template = json.loads(str(refusal.value).partition("by hand: ")[2])
        assert template["layers"] == [{"kind": "full_attention", "count": 3, "kv_heads": 2, "head_dim": 64}]
        assert read_model(template).token_bytes == 3 * 2 * 2 * 64 * 2
