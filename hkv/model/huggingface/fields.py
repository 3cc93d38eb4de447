"""A `config.json` that remembers which field every value came from."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.errors import ConfigError, FileError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model import released

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields in which multimodal models keep the config of their decoder."""

MOST_LAYERS = 10_000
"""More layers than that are a slip of the pen."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A number, and the fields of the config that decide it.

    Attributes:
      value: the number.
      names: fields, as a path from the top of the file.
    """

    value: int
    names: tuple[str, ...]

    def times(self, other: Field | int) -> Field:
        """The product."""
        if isinstance(other, int):
            return Field(self.value * other, self.names)
        return Field(self.value * other.value, (*self.names, *other.names))

    def plus(self, other: Field) -> Field:
        """The sum."""
        return Field(self.value + other.value, (*self.names, *other.names))


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields that describe a decoder.

    Attributes:
      values: the decoder's own fields.
      outer: fields around them, where a multimodal config nests the decoder's; else empty.
      path: prefix of a field's name, e.g. `text_config.`.
    """

    values: Mapping[str, Any]
    outer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fields:
        """The decoder's fields of a whole config.

        Raises:
          ConfigError: the config is not an object, or describes no decoder.
        """
        if not isinstance(config, Mapping):
            raise ConfigError("config", config, "a JSON object")
        for name in NESTED:
            inner = config.get(name)
            if isinstance(inner, Mapping) and "num_hidden_layers" not in config:
                fields = cls.of(inner)
                return cls(fields.values, config, f"{name}.{fields.path}")
        return cls(config)

    @property
    def model_type(self) -> str:
        """The decoder's `model_type`; the whole model's where the decoder has none."""
        return str(self.values.get("model_type") or self.outer.get("model_type") or "")

    def has(self, name: str) -> bool:
        """True if the field is there and not null."""
        return self.values.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """The field's value as it stands."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, *names: str, default: int | None = None) -> Field:
        """The first of these fields that is there.

        Raises:
          ConfigError: it is not a positive integer, or beyond `MAX_TOKENS`; or none is there and there is no default.
        """
        for name in names:
            value = self.values.get(name)
            if value is not None:
                check_whole(self.path + name, value, 1, MAX_TOKENS)
                return Field(value, (self.path + name,))
        if default is None:
            raise ConfigError(self.path + names[0], None, "a positive integer: the layers' bytes depend on it")
        return Field(default, ())

    def count(self, name: str) -> int:
        """A field that may be 0, and is where nothing says.

        Raises:
          ConfigError: it is not a non-negative integer.
        """
        value = self.values.get(name)
        if value is None:
            return 0
        check_whole(self.path + name, value, 0, MAX_TOKENS)
        return value

    def dtype(self) -> tuple[str, tuple[str, ...]]:
        """The model's element type by name, and the field it came from; bfloat16 where none says."""
        for fields, path in ((self.values, self.path), (self.outer, "")):
            for name in ("torch_dtype", "dtype"):
                value = fields.get(name)
                if isinstance(value, str):
                    return value.removeprefix("torch."), (path + name,)
        return "bfloat16", ()

    def layer_types(self, *names: str) -> list[tuple[str, str]] | None:
        """`(type, field)` of each layer from the first of these lists that is there, or None.

        Raises:
          ConfigError: not a list of strings, or not one for each of `num_hidden_layers`.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
                raise ConfigError(self.path + name, value, "a list of names of layer types")
            layers = self.values.get("num_hidden_layers")
            if layers is not None and layers != len(value):
                raise ConfigError(self.path + name, len(value), f"{layers} entries, one a layer (num_hidden_layers)")
            return [(kind, f"{self.path}{name}[{i}]") for i, kind in enumerate(value)]
        return None

    @property
    def head_dim(self) -> Field:
        """Elements of one key head: `head_dim`, else what the hidden size leaves for each query head."""
        if self.has("head_dim"):
            return self.integer("head_dim")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        return Field(hidden.value // heads.value, (*hidden.names, *heads.names))

    @property
    def kv_heads(self) -> Field:
        """Key/value heads; as many as query heads where nothing says."""
        return self.integer("num_key_value_heads", "num_attention_heads")

    @property
    def num_layers(self) -> int:
        """Decoder layers.

        Raises:
          ConfigError: no such number, or one beyond `MOST_LAYERS`.
        """
        count = self.integer("num_hidden_layers").value
        if count > MOST_LAYERS:
            raise ConfigError(self.path + "num_hidden_layers", count, f"at most {MOST_LAYERS}")
        return count

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return self.integer("max_position_embeddings", "model_max_length", "max_seq_len", default=4096).value


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The config of a file, of the `config.json` in a folder, or of a released model that HKV ships.

    Args:
      path: the file or the folder; where there is none, the name of a released model.

    Raises:
      FileError: it cannot be read, or is not a JSON object; or there is neither a file nor a model of that name.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return _released_config(path.as_posix())
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(str(path), None, "", error.strerror, "a readable config.json") from None
    except (ValueError, RecursionError) as error:
        raise FileError(str(path), getattr(error, "lineno", None), "", str(error), "JSON") from None
    if not isinstance(config, dict):
        raise FileError(str(path), None, "", type(config).__name__, "a JSON object")
    return config


def _released_config(name: str) -> dict[str, Any]:
    model = released.find(name)
    if model is None:
        names = ", ".join(released.near(name)) or released.released_models()[0].name
        expected = f"a readable config.json, the folder it is in, or a released model, such as {names}"
        raise FileError(name, None, "", "no such file, and no released model of that name", expected)
    return model.config()
