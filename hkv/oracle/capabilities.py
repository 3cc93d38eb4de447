"""Capabilities: what an engine has, of all that its dialect's answers say; only that is compared and judged.

An engine that lacks something names it in an attribute `lacks`, a sequence of names of `Dialect.capabilities`; a
program that speaks the process protocol answers the header with `{"lacks": [...]}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hkv.dialects.dialect import Dialect
from hkv.errors import ConfigError
from hkv.oracle.compare import Mismatch
from hkv.oracle.invariant import Invariant


def lacking(dialect: Dialect, engine: Any) -> frozenset[str]:
    """Capabilities that an engine says it lacks.

    Raises:
      ConfigError: the dialect has none of that name.
    """
    names = frozenset(getattr(engine, "lacks", ()))
    if unknown := sorted(names - dialect.capabilities.keys()):
        known = ", ".join(dialect.capabilities) or f"none: {dialect.title}'s engines have all that they answer"
        raise ConfigError("lacks", unknown[0], f"some of {known}")
    return names


def compare(dialect: Dialect, want: Any, got: Any, version: int, lacks: frozenset[str]) -> Mismatch | None:
    """`Dialect.compare` of what both answers have."""
    if lacks:
        want, got = dialect.without(want, lacks), dialect.without(got, lacks)
    return dialect.compare(want, got, version)


def judged(invariants: Iterable[Invariant], lacks: frozenset[str]) -> list[Invariant]:
    """The invariants that can be asked of an engine with these lacks."""
    return [invariant for invariant in invariants if not lacks.intersection(invariant.needs)]
