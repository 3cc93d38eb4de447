"""Configs of multimodal models, which hold their decoder's config inside (wrappers.toml)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.family import table_of, words

LAYER_LIST = "layer_list"
"""The `model_type` of layers that are listed by hand."""

ARCHITECTURES = {"LongcatFlashForCausalLM": "longcat_flash", "Mistral3ForConditionalGeneration": "mistral3"}
"""Types of models by architecture, for files without a `model_type` (vLLM 0.33 `_ARCHITECTURE_TO_MODEL_TYPE`)."""


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """One `model_type` around a decoder, as wrappers.toml has it."""

    decoder: str
    keys: tuple[str, ...] = ("text_config",)
    flat: bool = False


_TABLE = table_of("wrappers.toml")

WRAPPERS = {
    **{outer: Wrapper(inner) for outer, inner in map(str.split, _TABLE["text_config"].strip().splitlines())},
    **{outer: Wrapper(inner, flat=True) for outer, inner in map(str.split, _TABLE["flat"].strip().splitlines())},
    **{outer: Wrapper(found["decoder"], tuple(found["keys"])) for outer, found in _TABLE["keys"].items()},
}

INERT = words(_TABLE["inert"]["every"])
"""Fields around a decoder on which its cache does not depend: encoders, projectors, marks in the text."""

_TILED = dict.fromkeys(_TABLE["inert"]["with_tiles"].split(), _TABLE["inert"]["tiles"])

BY_TYPE = {name: words(text) for name, text in (_TILED | _TABLE["inert"]["types"]).items()}
"""Such fields of single models."""


def type_of(config: Mapping[str, Any]) -> str:
    """The `model_type`, or the one that a list of layers, or an architecture, has without it."""
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
