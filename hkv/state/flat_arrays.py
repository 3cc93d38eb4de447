"""Arrays of one or more states, lanes one after the other and flat, as loops carry them.

One flat array a field, not one with a leading axis: an index is then a single number, an access a single slice, and XLA
updates it in place. A workspace names its arrays, so that a loop can say which it carries; an array that it does not
name is absent inside, and using it is an error at tracing, not a silent copy.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from hkv.state import loops
from hkv.state.loops import Scalar


@dataclasses.dataclass(frozen=True)
class FlatArrays:
    """Arrays of `sizes.lanes` states, one of which is worked on; a subclass says where things are in its arrays."""

    CARRIED: ClassVar[tuple[str, ...]]
    """Names of the arrays that a loop's body sees only if the loop names them."""

    ROOMS: ClassVar[tuple[str, ...]]
    """Names of the outputs that may be left out: no room for them in `sizes`, by the same name."""

    sizes: Any
    lane: Scalar

    def replace(self, **changes: Any) -> Self:
        """The workspace with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def present(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names that a loop must carry: outputs without room are left out, and repetitions."""
        absent = {each for name in self.ROOMS if getattr(self.sizes, name) == 0 for each in (name, f"num_{name}")}
        return tuple(name for name in dict.fromkeys(names) if name not in absent)

    def only(self, names: Sequence[str], values: Sequence[jax.Array]) -> Self:
        """The workspace as a loop's body sees it: arrays that are not named are absent."""
        absent = dict.fromkeys(self.CARRIED)
        return dataclasses.replace(self, **{**absent, **dict(zip(names, values, strict=True))})

    # Reading and writing: indices come from the functions below.

    def read(self, name: str, index: Any) -> Scalar:
        """An element of the array of that name."""
        return loops.read(self._array(name), index)

    def write(self, name: str, value: Any, index: Any) -> Self:
        """The workspace with one element of the array of that name replaced."""
        return self.replace(**{name: loops.write(self._array(name), value, index)})

    def write_if(self, condition: Scalar, name: str, value: Any, index: Any) -> Self:
        """`write` where the condition holds; a write to the array's spare element where not."""
        # Not a branch: `lax.cond` would copy the arrays that it passes on. A write that is not wanted goes where
        # nobody reads.
        spare = self._array(name).shape[0] - 1
        return self.write(name, value, jnp.where(condition, index, spare))

    def peek(self, present: Scalar, name: str, *indices: Any) -> tuple[Self, tuple[Scalar, ...]]:
        """Elements of one array, zeros unless `present`, read in a loop of their own (`hkv.state.loops.peek`)."""
        return self.peek_each(present, *((name, index) for index in indices))

    def peek_each(self, present: Scalar, *places: tuple[str, Any]) -> tuple[Self, tuple[Scalar, ...]]:
        """`peek` of elements of several arrays, each by its array's name and its index."""
        names, default = tuple(dict.fromkeys(name for name, _ in places)), (0,) * len(places)
        return loops.peek(present, lambda w: [w.read(*place) for place in places], self, names, default)

    # Requests: a row of `requests` each, whose first words are the request's own.

    def request(self, slot: Any, field: enum.IntEnum) -> Scalar:
        """Index into `requests` of a field of a request."""
        return self._record(slot) + int(field)

    def get(self, slot: Any, *fields: enum.IntEnum) -> tuple[Scalar, ...]:
        """Fields of a request."""
        return tuple(self.read("requests", self.request(slot, field)) for field in fields)

    def peek_request(self, present: Scalar, slot: Any, *fields: enum.IntEnum) -> tuple[Self, tuple[Scalar, ...]]:
        """Fields of a request, zeros unless `present` (`peek`)."""
        return self.peek(present, "requests", *(self.request(slot, field) for field in fields))

    def set(self, slot: Any, field: enum.IntEnum, value: Any) -> Self:
        """The workspace with a field of a request replaced."""
        return self.write("requests", value, self.request(slot, field))

    def result(self, place: Scalar, column: Any) -> Scalar:
        """Index into `results` of a column of an operation's result."""
        width = self.sizes.width
        return self._base((self.sizes.operations + 1) * width) + place * width + column

    def _record(self, slot: Any) -> Scalar:
        raise NotImplementedError

    def _array(self, name: str) -> jax.Array:
        array = getattr(self, name)
        if array is None:
            raise LookupError(f"a loop uses {name}, which it does not name among its reads or writes")
        return array

    def _base(self, size: int) -> Any:
        # A single lane is indexed from 0, as a constant: XLA then drops the additions from each access.
        return 0 if self.sizes.lanes == 1 else self.lane * size


@dataclasses.dataclass(frozen=True)
class ParameterView:
    """A lane of parameters that were given a leading axis. A dialect says how many columns the arrays have.

    Attributes:
      cache: int32[lanes * FIELDS], one value for each field of the whole cache, lanes one after the other.
      groups: int32[lanes * width * FIELDS], one value for each group and field, lane after lane.
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
        return loops.read(self.cache, base + int(field))

    def group(self, group: Any, field: enum.IntEnum) -> Scalar:
        """A field of a group."""
        base = 0 if self.lane is None else self.lane * (self.width * self.FIELDS)
        return loops.read(self.groups, base + group * self.FIELDS + int(field))
