"""Fields of dataclasses that are options of commands, without click: what a plan takes can be imported without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

Declared = TypeVar("Declared")

KEY = "hkv.contract.options"
"""Key of a field's metadata under which an option stands."""


def option(default: Any = None, /, *names: str, **settings: Any) -> Any:
    """A field that is an option: its default, its names where it has others than the field's, and click's settings.

    A `type` that is a `range` stands for the integers in it, a tuple of texts for a choice among them.
    """
    return dataclasses.field(default=default, metadata={KEY: (names, settings)})


def argument(default: Any = None, **settings: Any) -> Any:
    """A field that is an argument, with click's settings."""
    return dataclasses.field(default=default, metadata={KEY: settings})


def group(declared: type[Declared]) -> Any:
    """A field that holds options declared elsewhere, at this place of the help."""
    return dataclasses.field(default_factory=declared, metadata={KEY: declared})


def listed(options: Sequence[Any]) -> Any:
    """A field that holds the values of options by name, at this place of the help."""
    return dataclasses.field(default_factory=dict, metadata={KEY: tuple(options)})
