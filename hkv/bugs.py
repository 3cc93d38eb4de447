"""Known upstream defects, by name: what they break, and where. HKV reproduces one only when asked to by name."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from hkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bug:
    """One defect of a published engine.

    Attributes:
      name: how `--bugs` and logs call it.
      engine: whose defect, and of which version.
      contract: what should hold.
      behaviour: what the engine does instead.
    """

    name: str
    engine: str
    contract: str
    behaviour: str


_BUGS: tuple[Bug, ...] = ()

BUGS = MappingProxyType({bug.name: bug for bug in _BUGS})
"""Every known defect, by name."""


def check_bugs(names: frozenset[str]) -> None:
    """Raise ConfigError unless every name is in `BUGS`."""
    for name in sorted(names - BUGS.keys()):
        raise ConfigError("bugs", name, f"names of {', '.join(BUGS) or 'no known defect'}")
