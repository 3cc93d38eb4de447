"""Families of models as data: fields that decide what layers cache, fields that do not; and what is around decoders."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.resources
import json
import tomllib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hkv.errors import ConfigError
from hkv.model.released import released_models

if TYPE_CHECKING:
    from hkv.model.huggingface.model import Model

Reader = Callable[[Any], "Model"]
"""Makes the layers of a model, from a `Decoder` that knows its family's fields."""


class Missing(enum.Enum):
    """The default of a field that no library fills in."""

    REQUIRED = "required"


REQUIRED = Missing.REQUIRED
"""A file without the field is refused."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`: the model's name, its reader, and its fields as families.toml has them.

    A field that decides has a default: a value, None for "derived or absent", or `REQUIRED`. The others are inert, some
    only at one value. Spellings are other names that a file may have, and the field each stands for.
    """

    name: str
    read: Reader
    fields: Mapping[str, Any]
    inert: frozenset[str]
    only: Mapping[str, Any]
    spellings: Mapping[str, str]

    @property
    def known(self) -> frozenset[str]:
        """Every name that the family itself declares."""
        return frozenset(self.fields) | self.inert | frozenset(self.only) | frozenset(self.spellings)


def words(text: str) -> frozenset[str]:
    """The names in a text, separated by white space."""
    return frozenset(text.split())


def table_of(name: str) -> dict[str, Any]:
    """The content of a TOML file of this folder."""
    return tomllib.loads(importlib.resources.files("hkv.model.huggingface").joinpath(name).read_text("utf-8"))


COLUMNS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "longest": "max_position_embeddings",
    "window": "sliding_window",
}
"""Headings that stand for longer names of fields."""

CELLS = {"-": None, "!": REQUIRED, "true": True, "false": False}
"""Cells of rows that are no number."""

_TABLE = table_of("families.toml")

INERT = words(_TABLE["every"]["inert"])
"""Fields of every family on which no byte depends, unless it declares one as deciding."""

ONLY = {name: None if value == "-" else value for name, value in _TABLE["every"]["only"].items()}
"""Fields of every family that are inert at this value; None stands for any truth value."""


def families_of(readers: Mapping[str, Reader]) -> dict[str, Family]:
    """Families by `model_type`, each with its reader out of `readers`."""
    found = {}
    for block in _TABLE["family"]:
        columns = [str(COLUMNS.get(name, name)) for name in block.get("columns", "").split()]
        common: dict[str, Any] = {
            **block.get("fields", {}),
            **dict.fromkeys(block.get("absent", "").split()),
            **dict.fromkeys(block.get("required", "").split(), REQUIRED),
        }
        for model_type, *cells in map(str.split, block["rows"].strip().splitlines()):
            own = zip(columns, cells, strict=False)
            found[model_type] = Family(
                name=" ".join(cells[len(columns) :]),
                read=readers[block["read"]],
                fields={**{name: _cell(cell) for name, cell in own if cell != "."}, **common},
                inert=words(block.get("inert", "")) | words(_TABLE["inert"].get(model_type, "")),
                only={name: None if value == "-" else value for name, value in block.get("only", {}).items()},
                spellings=block.get("spellings", {}),
            )
    return found


def _cell(text: str) -> Any:
    return CELLS[text] if text in CELLS else int(text)


# A list of layers to begin with, for a config that HKV refuses.


def layer_template(config: Mapping[str, Any]) -> str:
    """A list of full-attention layers in one line of JSON, with the numbers that the config has under common names."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = inner

    def number(default: int, *names: str) -> int:
        found = (config.get(name) for name in names)
        return next((value for value in found if type(value) is int and value > 0), default)

    heads = number(8, "num_attention_heads", "n_head")
    layer = {
        "kind": "full_attention",
        "count": number(32, "num_hidden_layers", "n_layer"),
        "kv_heads": number(heads, "num_key_value_heads"),
        "head_dim": number(max(1, number(128 * heads, "hidden_size", "n_embd") // heads), "head_dim"),
    }
    longest = number(4096, "max_position_embeddings", "n_positions")
    return json.dumps({"model_type": "layer_list", "max_position_embeddings": longest, "layers": [layer]})


# Configs of multimodal models, which hold their decoder's config inside (wrappers.toml).

LAYER_LIST = "layer_list"
"""The `model_type` of layers that are listed by hand."""


@functools.cache
def architectures() -> Mapping[str, str]:
    """Types of models by architecture, for files without a `model_type`: those that released models have it with."""
    configs = [model.config() for model in released_models()]
    typed = [each for each in configs if "model_type" in each]
    named = {one: each["model_type"] for each in typed for one in each.get("architectures") or ()}
    return {**named, **_WRAPPERS["architectures"]}


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """One `model_type` around a decoder, as wrappers.toml has it."""

    decoder: str
    keys: tuple[str, ...] = ("text_config",)
    flat: bool = False


_WRAPPERS = table_of("wrappers.toml")

WRAPPERS = {
    **{outer: Wrapper(inner) for outer, inner in map(str.split, _WRAPPERS["text_config"].strip().splitlines())},
    **{outer: Wrapper(inner, flat=True) for outer, inner in map(str.split, _WRAPPERS["flat"].strip().splitlines())},
    **{outer: Wrapper(found["decoder"], tuple(found["keys"])) for outer, found in _WRAPPERS["keys"].items()},
}

AROUND = words(_WRAPPERS["inert"]["every"])
"""Fields around a decoder on which its cache does not depend: encoders, projectors, marks in the text."""

_TILED = dict.fromkeys(_WRAPPERS["inert"]["with_tiles"].split(), _WRAPPERS["inert"]["tiles"])

BY_TYPE = {name: words(text) for name, text in (_TILED | _WRAPPERS["inert"]["types"]).items()}
"""Such fields of single models."""


def type_of(config: Mapping[str, Any]) -> str:
    """The `model_type`, or the one that a list of layers, or an architecture, has without it."""
    model_type = config.get("model_type")
    if model_type is None and isinstance(config.get("layers"), list):
        return LAYER_LIST
    if model_type is None:
        named = config.get("architectures")
        for architecture in named if isinstance(named, list) else ():
            if isinstance(architecture, str) and architecture in architectures():
                return architectures()[architecture]
    if not isinstance(model_type, str):
        raise ConfigError("model_type", model_type, "the name of a type of model")
    return model_type
