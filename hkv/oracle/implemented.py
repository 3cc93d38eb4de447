"""Configurations that an engine implements, found by making it."""

from __future__ import annotations

from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.traffic import RandomChoices
from hkv.oracle.engine import make_engine

DRAWS = 300
"""Configurations of a feature and a version that are looked at for those of one group."""

TRIES = 3
"""Configurations of one kind of group that an engine is made of before it counts as not implemented."""


def flags_for(factory: EngineFactory, dialect: str) -> str:
    """Options of `hkv diff` under which an engine implements what is drawn; "" when it implements no group by itself.

    Args:
      factory: makes the engine; what it refuses, for whatever reason, counts as not implemented.
      dialect: name of the configurations' dialect.
    """
    rules = registry.dialect_of(dialect)
    versions, features = rules.drawn_versions(frozenset()), rules.short_features(dialect)
    found = [
        (kind, version, feature)
        for version in versions
        for feature in features
        for kind in _kinds(factory, feature, version, dialect)
    ]
    if not found:
        return ""
    kinds, taken, about = (list(dict.fromkeys(column)) for column in zip(*found, strict=True))
    flags = [f"--kinds {','.join(kinds)}", "--max-groups 1"]
    flags += [f"--version {taken[-1]}"] if len(taken) < len(versions) else []
    flags += [f"--feature {feature}" for feature in about] if len(about) < len(features) else []
    return " ".join(flags)


def _kinds(factory: EngineFactory, feature: str, version: int, dialect: str) -> list[str]:
    """Kinds of groups that the engine implements alone."""
    rules, choices, tries = registry.dialect_of(dialect), RandomChoices(0), dict[str, int]()
    found: list[str] = []
    for _ in range(DRAWS):
        header = rules.draw_header(choices, feature, version, dialect)
        (kind, *more) = [kind for kind, _ in rules.groups(header)]
        if more or kind in found or tries.get(kind, 0) >= TRIES:
            continue
        tries[kind] = tries.get(kind, 0) + 1
        if _implements(factory, header):
            found.append(kind)
    return found


def _implements(factory: EngineFactory, header: Any) -> bool:
    try:
        make_engine(factory, header)
    except Exception:  # some engines refuse in their own words
        return False
    return True
