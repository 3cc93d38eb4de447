"""A configuration as two small traced arrays, read field by field."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar

import jax

from hkv.state.loops import Scalar, read


@dataclasses.dataclass(frozen=True)
class ParameterView:
    """A lane of parameters that were given a leading axis. A dialect says how many columns the arrays have.

    Attributes:
      cache: int32[lanes * FIELDS], one value for each field of the whole cache, lanes one after the other.
      groups: int32[lanes * width * FIELDS], for each group one value for each field, likewise.
      lane: the lane to read; None if there is only one.
      width: groups of a lane, those included that the configuration has not.
    """

    FIELDS: ClassVar[int]
    """Columns of both arrays."""

    cache: jax.Array
    groups: jax.Array
    lane: Scalar | None
    width: int

    def whole(self, field: enum.IntEnum) -> Scalar:
        """A field of the whole cache."""
        # Configurations are data: lanes of different configurations run in one program, each reading its own row.
        base = 0 if self.lane is None else self.lane * self.FIELDS
        return read(self.cache, base + int(field))

    def group(self, group: Any, field: enum.IntEnum) -> Scalar:
        """A field of a group."""
        base = 0 if self.lane is None else self.lane * (self.width * self.FIELDS)
        return read(self.groups, base + group * self.FIELDS + int(field))
