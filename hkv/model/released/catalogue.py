"""The released models that HKV ships configs of, and their names."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any, Literal

import msgspec

FOLDER = importlib.resources.files("hkv.model.released")


class Released(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A released model.

    Attributes:
      ids: repositories on Hugging Face whose config has these values.
      form: `copy` of a whole config.json; `excerpt` of one, the decoder's fields; or single `values` put together.
      source: address of what was read.
      other_sources: addresses of single values that are not from there, by field.
      compared: addresses of other sources that have the same values.
      note: anything else one has to know.
      name: HKV's name of it.
    """

    ids: tuple[str, ...]
    form: Literal["copy", "excerpt", "values"]
    source: str
    other_sources: dict[str, str] = {}
    compared: tuple[str, ...] = ()
    note: str = ""
    name: str = ""

    def config(self) -> dict[str, Any]:
        """The content of its config.json."""
        return json.loads((FOLDER / "configs" / f"{self.name}.json").read_text(encoding="utf-8"))

    @property
    def names(self) -> frozenset[str]:
        """Names that it is found by, in lower case: its own, and each repository with and without the organisation."""
        repositories = {repository.lower() for repository in self.ids}
        return frozenset({self.name, *repositories, *(name.partition("/")[2] for name in repositories)})


@functools.cache
def released_models() -> tuple[Released, ...]:
    """Every released model that HKV ships a config of, by name."""
    text = (FOLDER / "index.toml").read_text(encoding="utf-8")
    entries = msgspec.toml.decode(text, type=dict[str, Released])
    return tuple(msgspec.structs.replace(entries[name], name=name) for name in sorted(entries))


def find(name: str) -> Released | None:
    """The model of a name, in upper or lower case, or None."""
    return next((model for model in released_models() if name.lower() in model.names), None)
