"""Layers that read another layer's cache, served: Gemma 3n and Gemma 4, and topologies that say so."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

import hkv
from hkv import serving
from hkv.errors import OperationError
from hkv.model.topology import Group, Layer

MODELS = pathlib.Path(__file__).parents[1] / "data" / "models"


def owners(config: dict) -> dict[str, str]:
    """The rule of transformers 5.20 (`Gemma3nTextAttention`, `Gemma4TextAttention`): the last own one of the kind."""
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    first = len(kinds) - shared
    own = kinds[:first]
    return {
        f"layers.{index}": f"layers.{len(own) - 1 - own[::-1].index(kinds[index])}"
        for index in range(first, len(kinds))
    }


@pytest.mark.parametrize(("name", "shared"), [("gemma3n_text", 15), ("gemma4_text", 0), ("gemma4_text", 18)])
def test_a_plan_says_whose_cache_a_layer_reads(name, shared, tmp_path):
    config = json.loads((MODELS / f"{name}.json").read_text()) | {"num_kv_shared_layers": shared}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name} | config))
    served = serving.from_plan(hkv.plan(hkv.read_model(path), "64MiB", max_model_len=64), rows=1)
    wanted = owners(config)
    assert len(wanted) == shared
    assert dict(served.readers) == wanted
    for index, kind in enumerate(config["layer_types"]):
        at = served.layer(f"layers.{index}")
        assert at.name == wanted.get(f"layers.{index}", f"layers.{index}")
        assert (at.lookback == config["sliding_window"] - 1) == (kind == "sliding_attention")


def config() -> hkv.VllmConfig:
    sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    full, near = hkv.FullAttention(**sizes), hkv.SlidingWindow(**sizes, window=6)
    groups = (Group(tag="full", spec=full, layers=("0",)), Group(tag="near", spec=near, layers=("1",)))
    layers = tuple(Layer(name=name, tags=(tag,)) for name, tag in (("0", "full"), ("1", "near")))
    readers = Layer(name="2", cache_of="1"), Layer(name="3", cache_of="0")
    return hkv.cache_config(hkv.Topology(groups=groups, layers=(*layers, *readers)), 20, max_model_len=32)


def test_a_layer_attends_to_the_cache_that_it_reads_and_writes_none():
    served = serving.from_config(config(), rows=1, debug=True)
    served, _ = serving.arrive(served, np.array([0]), np.zeros((1, 32), np.int32), np.array([9]))
    served, turn = serving.step(served, np.zeros(9, np.int32), np.array([0, 9]))
    draw = np.random.default_rng(0).normal(size=(3, 9, 1, 8)).astype(np.float32)
    for layer, content in zip("01", draw, strict=False):
        served = serving.write(served, layer, turn, {"key": content, "value": content})
    for layer, owner in (("2", "1"), ("3", "0")):
        found, own = (serving.attend(served, name, turn, draw[2]) for name in (layer, owner))
        np.testing.assert_array_equal(found, own)
        assert serving.gather(served, layer, 0).keys() == {"key", "value"}
        for call in (
            lambda name=layer: serving.write(served, name, turn, {"key": draw[2], "value": draw[2]}),
            lambda name=layer: serving.mark_written(served, name, turn),
        ):
            expected = f"layer = '{layer}': expected a layer with a cache of its own; this one reads that of {owner}"
            with pytest.raises(OperationError, match=expected):
                call()
    with pytest.raises(OperationError, match="layer = '4': expected one of 0, 1, 2, 3"):
        served.layer("4")
