"""Many operations under SGLang's rules in one dispatch: the text, compiled, from state to state.

    state = empty_state(config, keys=4096, requests=16, row=256, operations=64)
    batch = Batch().add(Code.ADMIT, 0, [1, 2, 3], tokens=12).add(Code.EXTEND, 0, length=12)
    state = program(config)(batch.into(state), len(batch))
    results(state, len(batch))["hit"]

A state is int32 arrays and scalars by the names of `LAYOUT`, and is donated: use the one that is returned. A key, from
1 on, stands for a page and everything before it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Self

import numpy as np

from hkv.dialects.sglang.config import SGLangConfig
from hkv.dialects.sglang.engines.numpy import ARGUMENTS
from hkv.dialects.sglang.plain import LAYOUT, empty, settings
from hkv.errors import OperationError
from hkv.lowering import State
from hkv.lowering.programs import Program
from reference.dialects.sglang.operations import perform_all
from reference.dialects.sglang.records import Code, Result, Status

__all__ = ["LAYOUT", "Batch", "Code", "Status", "check", "empty_state", "program", "results"]

WHOLE = {"config.alone": 0}
"""Scalars that every program knows: a tree alone has no operations."""


def empty_state(config: SGLangConfig, *, known: bool = True, **sizes: int) -> State:
    """An empty cache.

    Args:
      config: the configuration.
      known: whether it is for a program that knows the configuration; else that is in the state.
      **sizes: keys, requests, row, operations, payload, room: as `hkv.dialects.sglang.plain.empty` takes them.
    """
    state = LAYOUT.arrays_of(empty(config, **sizes))  # type: ignore[arg-type]
    return {name: array for name, array in state.items() if name not in (settings(config) if known else WHOLE)}


def program(config: SGLangConfig | None = None, *, lanes: bool = False) -> Program:
    """The program `(state, count) -> state` that performs the first `count` operations in order.

    Args:
      config: a configuration that it knows, which halves it; None for one that takes it from the state.
      lanes: whether state and count have a leading axis, of caches of different configurations, say.
    """
    return _program(tuple(sorted((WHOLE if config is None else settings(config)).items())), lanes)


@functools.cache
def _program(static: tuple[tuple[str, int], ...], lanes: bool) -> Program:
    return Program(LAYOUT, perform_all, dict(static), lanes=lanes)


class Batch:
    """Operations in order, noted on the host.

    Attributes:
      rows: fields of each operation, by name. keys: those of all, in which each has `count` from `start` on.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.keys: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, code: Code, slot: int = 0, keys: Sequence[int] = (), **given: int) -> Self:
        """Adds an operation.

        Args:
          code: what it is.
          slot: of its request, from 0 on.
          keys: of the whole pages of its tokens; of a decoded token, of the page that it fills.
          **given: further fields of `reference.dialects.sglang.records.Operation`; the others are 0.

        Raises:
          OperationError: it has no field of such a name.
        """
        if unknown := given.keys() - set(ARGUMENTS):
            raise OperationError(min(unknown), given[min(unknown)], f"one of {', '.join(ARGUMENTS)}")
        self.rows.append({"code": code, "slot": slot, "count": len(keys), "start": len(self.keys), **given})
        self.keys += keys
        return self

    def into(self, state: State) -> State:
        """A state, with these operations as those that are to be performed.

        Raises:
          OperationError: it has no room for them or for their keys, or not such keys.
        """
        room, keys = len(state["operations.code"]) - 1, len(state["keys.page"]) - 1
        if len(self) > room:
            raise OperationError("operations", len(self), f"at most {room}, which the state has room for")
        if len(self.keys) > len(state["payload"]) - 1:
            raise OperationError("keys", len(self.keys), f"at most {len(state['payload']) - 1} in a batch")
        if wrong := [key for key in self.keys if not 1 <= key <= keys]:
            raise OperationError("key", wrong[0], f"from 1 to {keys}")
        into = dict(state)
        for name in (*("code", "slot", "count", "start"), *ARGUMENTS):
            array = np.zeros(room + 1, np.int32)
            array[1 : len(self) + 1] = [row.get(name, 0) for row in self.rows]
            into[f"operations.{name}"] = array
        into["payload"] = np.zeros(len(state["payload"]), np.int32)
        into["payload"][: len(self.keys)] = self.keys
        return into


def results(state: State, count: int) -> dict[str, np.ndarray]:
    """int32[count], or int32[lanes, count]: each field of `reference.dialects.sglang.records.Result`, by name."""
    return {name: np.asarray(state[f"results.{name}"])[..., 1 : count + 1] for name in Result.__annotations__}


def check(state: State, count: int) -> None:
    """Debug mode: raises OperationError for the first operation that was refused, by its place and its status."""
    for place, status in enumerate(results(state, count)["status"]):
        if status != Status.OK:
            raise OperationError(f"operations[{place}]", Status(status).name, "an operation that is granted")
