"""A text's rule as a compiled program: performed on arrays, or on plain objects in place of the rule itself."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np

from hkv.lowering import State, lowered, over_lanes
from hkv.lowering.code import Among
from hkv.machine import native_loops
from hkv.machine.kept_programs import KeptProgram
from reference.language import Layout


class Program:
    """A rule of a text, lowered, and compiled once for each choice of sizes.

    Executables outlive the process where those of HKV do (`hkv.machine.kept_programs`).

    Args:
      layout: of the cache that is the rule's first parameter.
      rule: a function of a text; its other arguments are numbers.
      static: values of scalars that prune the program; states have them not.
      among: of arrays, the only values that the rule ever reads there (`lowered`).
      lanes: whether states and numbers are of several caches, with a leading axis (`over_lanes`).
    """

    def __init__(
        self,
        layout: Layout,
        rule: FunctionType,
        static: Mapping[str, int] = MappingProxyType({}),
        *,
        among: Among = MappingProxyType({}),
        lanes: bool = False,
    ) -> None:
        self._layout, self._static = layout, dict(static)
        made_of = repr((sorted(self._static.items()), *([sorted(among.items())] if among else []), lanes))
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:8]
        self._kept = KeptProgram(
            (over_lanes if lanes else lowered)(layout, rule, self._static, among=among),
            (0,),
            f"{rule.__module__}.{rule.__qualname__}-{made_of}",
            lambda state, *_: state,
            tuple(sorted({"reference", *(each.__module__.partition(".")[0] for each in (rule, layout.root))})),
        )

    def __call__(self, state: State, *given: Any) -> State:
        """Performs the rule: the new state; the old one is donated.

        Emits `InterpretedLoopsWarning` as `hkv.machine.native_loops` says.
        """
        native_loops.warn_if_interpreted()
        return self._kept(state, *(np.asarray(number, np.int32) for number in given))

    def state_of(self, cache: Any) -> State:
        """The arrays and scalars of plain objects that the program takes.

        Raises:
          ValueError: a scalar of theirs is not what the program was pruned to.
        """
        state: State = self._layout.arrays_of(cache)
        for name, known in self._static.items():
            if (held := int(state.pop(name))) != known:
                raise ValueError(f"{name} is {held}: expected {known}, which the program is made for")
        return state

    def lower(self, state: State, *given: Any) -> Any:
        """The program for states of such sizes, not compiled yet."""
        return self._kept.lower(state, *(np.asarray(number, np.int32) for number in given))

    def compilations(self) -> int:
        """Number of executables that calls compiled or loaded."""
        return self._kept.compilations()


class Mirror:
    """Plain objects, whose arrays a program changes; what it changed in these is changed in the objects after it.

    Args:
      layout: of the objects.
      program: the program.
      cache: the objects. Their tables may grow, and lines lengthen.
      written: tables and arrays that others than the program write, besides scalars.
    """

    def __init__(self, layout: Layout, program: Program, cache: Any, written: Collection[str]) -> None:
        self._layout, self._program, self._cache = layout, program, cache
        self._written = [name for name, flat in layout.arrays.items() if {name, flat.table} & {*written}]
        self._sizes: dict[str, int] = {}

    def perform(self, *given: int) -> None:
        """Performs the program's rule on the objects, as calling it would."""
        state = self._current()
        after = {name: np.asarray(array) for name, array in self._program(state, *given).items()}
        for name, array in after.items():
            places = np.flatnonzero(array != state[name])
            if places.size:
                self._layout.change(self._cache, name, places.tolist(), array.reshape(-1)[places].tolist())
        self._state = after

    def _current(self) -> State:
        """The arrays of the objects: those after the last operation, but for what others may have written since."""
        if (sizes := self._layout.sizes_of(self._cache)) != self._sizes:
            self._sizes, self._records = sizes, self._layout.records_of(self._cache)
            self._state = self._program.state_of(self._cache)
            self._names = [*self._written, *(name for name in self._layout.scalars if name in self._state)]
        numbers = self._layout.numbers_of(self._cache, self._names, self._records)
        return self._state | {name: np.array(each, np.int32) for name, each in numbers.items()}
