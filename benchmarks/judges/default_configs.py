"""Configs with the values that `transformers` gives each family by default, as `config.json` files would have them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
"""Tables of transformers that name the classes which generate text, by the config's `model_type`."""

LEFT_OUT = ("_name_or_path", "transformers_version", "id2label", "label2id")
"""Fields that say nothing of a model."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A config to be judged.

    Attributes:
      name: of the config, unique.
      config: the content of its config.json.
      origin: where its values are from.
      digest: of the file that HKV ships, or nothing.
    """

    name: str
    config: Mapping[str, Any]
    origin: str
    digest: str = ""


def library_cases(served: frozenset[str]) -> Iterator[Case]:
    """Every config class of transformers with a class that generates text, with default values.

    Args:
      served: architectures that the engine knows; the first such one is named, else the first that transformers has.
    """
    transformers = importlib.import_module("transformers")
    configurations = importlib.import_module("transformers.models.auto.configuration_auto")
    for model_type in sorted(configurations.CONFIG_MAPPING_NAMES):
        if not architectures_of(model_type):
            continue
        try:
            config = configurations.CONFIG_MAPPING[model_type]()
            values = json.loads(config.to_json_string(use_diff=False))
        except Exception as error:  # a class that has no defaults raises whatever it likes
            yield Case(model_type, {"model_type": model_type, "unmade": f"{type(error).__name__}: {error}"[:200]}, "")
            continue
        architectures = architectures_of(model_type, multimodal="text_config" in values)
        chosen = next((name for name in architectures if name in served), architectures[0])
        kept = without_labels(values)
        kept["architectures"] = [chosen]
        # Library defaults leave the element type open; released configs name it.
        kept["dtype"] = kept.get("dtype") or "bfloat16"
        kept = supplemented(kept, cached=True)
        yield Case(model_type, kept, f"transformers {transformers.__version__}")


def supplemented(config: Mapping[str, Any], *, cached: bool) -> dict[str, Any]:
    """A config with the fields of `supplements.toml` that it did not have.

    Args:
      config: the content of a config.json.
      cached: also those that decide what is cached.
    """
    fields = dict(supplements().get(config.get("model_type", ""), {}))
    deciding = fields.pop("cached", {})
    result = copy.deepcopy(dict(config))
    for path, value in (fields | (deciding if cached else {})).items():
        *parts, name = path.split(".")
        place = result
        for part in parts:
            place = place.setdefault(part, {})
        if place.get(name) is None:
            place[name] = value
    return result


def loaded_as(name: str) -> dict[str, Any]:
    """Fields by which a released file is loaded that code of its own repository would load."""
    return supplements()["released"].get(name, {})


@functools.cache
def supplements() -> dict[str, dict[str, Any]]:
    """The fields in `supplements.toml`, by the config's type."""
    return tomllib.loads(pathlib.Path(__file__).with_name("supplements.toml").read_text(encoding="utf-8"))


def without_labels(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what says nothing of a model, at any depth."""
    return {
        name: without_labels(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in LEFT_OUT
    }


def architectures_of(model_type: str, multimodal: bool = False) -> list[str]:
    """Classes of transformers that generate text with a config of this type, best first.

    A config that holds a decoder's as a part is for the class that has the other parts too.
    """
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    found: list[str] = []
    for mapping in (*MAPPINGS[1:], MAPPINGS[0]) if multimodal else MAPPINGS:
        names = getattr(tables, mapping).get(model_type, ())
        found += [names] if isinstance(names, str) else list(names)
    return list(dict.fromkeys(found))
