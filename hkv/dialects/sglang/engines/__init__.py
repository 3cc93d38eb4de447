"""Engines under SGLang's rules: the reference, and an installed SGLang with its Python or its Rust tree.

Here is what both say alike of their trees, so that states can be compared: the order of nodes, and places for times.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hkv.dialects.sglang.config import SGLangConfig
from hkv.errors import ConfigError

T = TypeVar("T")

RELEASE = "0.5.23"


def of_components(config: SGLangConfig, full: T, window: T, states: T) -> list[T]:
    """Those of three things that belong to components which a cache has."""
    things = [full]
    things += [window] * (config.window is not None)
    return things + [states] * (config.states is not None)


def walk(node: T, named: Callable[[T], tuple[Iterable[str | None], list[int]]]) -> Iterator[T]:
    """Nodes after one, each before those after it; of siblings, the one with the smaller namespace and first tokens.

    Args:
      node: has `children`, by whatever.
      named: namespace and tokens of a node.
    """

    def place(child: T) -> tuple[list[str], list[int]]:
        namespace, tokens = named(child)
        return [name or "" for name in namespace], tokens

    children: dict[Any, T] = node.children  # type: ignore[attr-defined]
    for child in sorted(children.values(), key=place):
        yield child
        yield from walk(child, named)


def places(values: Iterable[T]) -> dict[T, int]:
    """Place of each of some times among them, from 0 for the earliest."""
    return {value: place for place, value in enumerate(sorted(set(values)))}  # type: ignore[type-var]


def require_sglang(release: str | None = None) -> None:
    """Raises ConfigError unless SGLang of a release is installed; None for 0.5.23."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("engine", "sglang", f"SGLang {RELEASE} to be installed (docs/radix.md says how)") from None
    if version != (release or RELEASE):
        raise ConfigError("sglang", version, f"release {release or RELEASE}, or the engine sglang@{version}")
