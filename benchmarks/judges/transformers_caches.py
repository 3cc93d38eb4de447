"""The second judge: caches that `transformers` itself makes for a config, layer by layer.

The library's model is built on the meta device and run once over a few tokens; `past_key_values.layers` then says each
layer's kind, and the shapes of what it holds.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.judges.records import message, pack

TOKENS = 8
"""Length of the run; shorter than any window, so that keys have as many positions as there are tokens."""


class UnjudgedError(Exception):
    """The library cannot build or run a config so; the message says why."""


def cache_answer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The library's caches for a config.

    Raises:
      UnjudgedError: it does not build or run on the meta device, or keeps no cache of layers.
    """
    stage = "config"
    try:
        transformers, torch = importlib.import_module("transformers"), importlib.import_module("torch")
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            loaded = transformers.AutoConfig.from_pretrained(folder)
        decoder = loaded.get_text_config(decoder=True)
        stage = "model"
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = _model(transformers, decoder, loaded)
        stage = "run"
        with torch.device("meta"), torch.no_grad():
            ids = torch.zeros((1, TOKENS), dtype=torch.long)
            output = model(input_ids=ids, use_cache=True)
        stage = "cache"
        layers = (getattr(output, "past_key_values", None) or output.cache_params).layers
        described = {f"layers.{index}": describe(layer) for index, layer in enumerate(layers)}
        return {"class": type(model).__name__, "layers": pack({name: each for name, each in described.items() if each})}
    except Exception as error:  # model files raise whatever they like
        raise UnjudgedError(f"{stage}: {type(error).__name__}: {message(error)}") from error


def _model(transformers: Any, decoder: Any, whole: Any) -> Any:
    """The decoder alone, or with its head, or with what sees and hears: whatever the library has a class for first."""
    ways = [(getattr(transformers, name), decoder) for name in ("AutoModel", "AutoModelForCausalLM")]
    ways += [(getattr(transformers, name), whole) for name in ("AutoModel", "AutoModelForImageTextToText")]
    failure: ValueError | None = None
    for way, config in ways:
        try:
            return way.from_config(config, attn_implementation="eager").eval()
        except ValueError as error:  # no class of this kind for the config
            failure = failure or error
    raise failure or ValueError("no class")


def describe(layer: Any) -> dict[str, Any]:
    """A layer of a cache: kind, heads and sizes of keys and values, window, shapes of states."""
    found: dict[str, Any] = {"kind": type(layer).__name__}
    keys: Any = getattr(layer, "keys", None)
    values: Any = getattr(layer, "values", None)
    if keys is not None and keys.dim() == 4:
        found |= {"num_kv_heads": keys.shape[1], "head_size": keys.shape[3], "head_size_v": values.shape[3]}
    if getattr(layer, "sliding_window", None) is not None:
        found["sliding_window"] = layer.sliding_window
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None)
        if states is not None:
            states = states.values() if isinstance(states, dict) else [states]
            found[name] = [list(state.shape[1:]) for state in states]
    return found if len(found) > 1 else {}
