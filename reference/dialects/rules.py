"""The record of a dialect's rules that the reference's manager calls, so that a test can give it others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from hkv.errors import ConfigError
from hkv.spec import LayerSpec

Kind = TypeVar("Kind")
"""Type of a dialect's rules for one kind of layer."""

Rule = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The seven decisions in which engines differ. Each is a pure function over the manager's state.

    Attributes:
      hit: the longest prefix of a request that every group can resume from.
      admit: whether a request's next tokens fit, before anything is taken.
      allocate: gives a request the blocks its next tokens need, adopting a hit's first.
      register: enters filled blocks into the prefix cache.
      retire: gives back blocks that no later query can read.
      free: gives back everything a request holds.
      evict: takes keys away from blocks.
    """

    hit: Rule
    admit: Rule
    allocate: Rule
    register: Rule
    retire: Rule
    free: Rule
    evict: Rule


@dataclasses.dataclass(frozen=True)
class RuleSet(Generic[Kind]):
    """One engine's policy: what a manager calls.

    Attributes:
      name: name of the rules and their version, as logs write it: `vllm-0.33`.
      kinds: per kind of layer, by its name in logs, what this dialect does with it.
      rules: the decisions.
    """

    name: str
    kinds: Mapping[str, Kind]
    rules: Rules

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", MappingProxyType(dict(self.kinds)))

    def kind(self, spec: LayerSpec) -> Kind:
        """Rules of this dialect for the kind of `spec`.

        Raises:
          ConfigError: the dialect has no rule for that kind.
        """
        try:
            return self.kinds[spec.kind]
        except KeyError:
            raise ConfigError("kind", spec.kind, f"a kind of {self.name}: {', '.join(sorted(self.kinds))}") from None
