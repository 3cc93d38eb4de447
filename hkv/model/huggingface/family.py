"""A family of models as data: fields that decide what its layers cache, with defaults, and fields that do not."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hkv.model.huggingface.model import Model


class Missing(enum.Enum):
    """The default of a field that no library fills in."""

    REQUIRED = "required"


REQUIRED = Missing.REQUIRED
"""A file without the field is refused."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
      name: the model's name, for people.
      read: makes the layers, from a `Decoder` that knows this family's fields.
      fields: every field that decides, and what the config class of transformers 5.20 (else of vLLM 0.33, else the
        model class's own reading) puts where the file has none: a value, None for "derived or absent", or `REQUIRED`.
      inert: fields of this family's config class, beside those of all families, on which no byte depends.
      only: fields that are inert as long as they have this value; another value is refused.
      spellings: other names of deciding fields, as the file may have them, and the field each stands for.
    """

    name: str
    read: Callable[[Any], Model]
    fields: Mapping[str, Any]
    inert: frozenset[str] = frozenset()
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """Every name that the family itself declares."""
        return frozenset(self.fields) | self.inert | frozenset(self.only) | frozenset(self.spellings)


def words(text: str) -> frozenset[str]:
    """The names in a text, separated by white space."""
    return frozenset(text.split())


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
