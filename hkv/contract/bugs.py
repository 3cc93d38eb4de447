"""Known upstream defects, by name: what they break, and where. HKV reproduces one only when asked to by name.

An engine's are listed next to its rules: `hkv.dialects.vllm.bugs`, `hkv.chunks.formats`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bug:
    """One defect of a published engine.

    Attributes:
      name: its name in `--bugs` and in logs.
      engine: the engine that has the defect, and its version.
      contract: the rule that should hold.
      behaviour: the engine's behaviour instead.
      part: `planning` (a plan of layers, pages and blocks), `manager` (a cache at work) or `chunks` (a transfer).
    """

    name: str
    engine: str
    contract: str
    behaviour: str
    part: str = "manager"


Bugs = Mapping[str, Bug]
"""Known defects, by name."""


def listed(*bugs: Bug) -> Bugs:
    """Defects by their names."""
    return MappingProxyType({bug.name: bug for bug in bugs})


def check_bugs(names: Iterable[str], known: Bugs, argument: str = "bugs") -> None:
    """Raise ConfigError unless every name is known."""
    for name in sorted(set(names) - known.keys()):
        raise ConfigError(argument, name, f"names of {', '.join(known) or 'no known defect'}")


def bugs_of_part(names: Iterable[str], part: str, title: str, known: Bugs, argument: str = "bugs") -> tuple[str, ...]:
    """The names, if all are those of defects that show in a part, `planning` or `manager`; else ConfigError."""
    found = tuple(names)
    if found and not known:
        raise ConfigError(argument, ", ".join(found), f"nothing under {title}'s rules, of which no defect is known")
    check_bugs(found, known, argument)
    for name in found:
        if known[name].part != part:
            expected = ", ".join(bug.name for bug in known.values() if bug.part == part)
            raise ConfigError(argument, name, f"a defect that shows here: {expected}")
    return found
