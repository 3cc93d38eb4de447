"""Arrays of one or more states, lanes one after the other and flat, as loops carry them."""

from __future__ import annotations

import dataclasses
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

    def _array(self, name: str) -> jax.Array:
        array = getattr(self, name)
        if array is None:
            raise LookupError(f"a loop uses {name}, which it does not name among its reads or writes")
        return array

    def _base(self, size: int) -> Any:
        # A single lane is indexed from 0, as a constant: XLA then drops the additions from each access.
        return 0 if self.sizes.lanes == 1 else self.lane * size
