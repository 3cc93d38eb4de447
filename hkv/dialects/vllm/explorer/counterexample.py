"""A way to a broken invariant, as a log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.explorer.ledger import LOOKED_UP, Fact
from hkv.dialects.vllm.explorer.moves import to_log
from hkv.dialects.vllm.explorer.transition import Program, start, unpack
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.structs import Answer, Header, Operation, StateOp
from hkv.dialects.vllm.rules.operations import Code
from hkv.errors import HKVError

FEATURE = "core"
"""Feature that the logs are marked with, for statistics."""


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """The shortest way to a broken invariant: no shorter sequence of operations breaks any.

    Attributes:
      invariants: those that the last operation breaks.
      header: the configuration.
      operations: as the log format writes them.
    """

    invariants: tuple[str, ...]
    header: Header
    operations: tuple[Operation, ...]

    def with_answers(self) -> tuple[tuple[Operation, ...], tuple[Answer, ...]]:
        """The operations and a `state` after them, with what the reference answers to each.

        A defect may have led where the reference does not follow, to a hit that it does not find; the operations then
        end before that.
        """
        engine, performed, answers = NumpyEngine(self.header), [], []
        assert isinstance(engine, NumpyEngine)
        for operation in self.operations:
            try:
                answers.append(apply(engine, operation))
            except HKVError:
                break
            performed.append(operation)
        last = StateOp()
        return (*performed, last), (*answers, apply(engine, last))


def counterexample(program: Program, moves: np.ndarray, chunk: int, invariants: Sequence[str]) -> Counterexample:
    """Follows operations from the empty cache and writes them down.

    Args:
      program: of the space.
      moves: int32[n, 4], the operations.
      chunk: worlds that the program takes.
      invariants: invariants that the last operation breaks.
    """
    header = to_header(program.space.config, FEATURE)
    return Counterexample(tuple(invariants), header, tuple(written(program, moves, chunk)))


def written(program: Program, moves: np.ndarray, chunk: int) -> list[Operation]:
    """Operations from the empty cache on, as the log format writes them; arguments as `counterexample`."""
    space, world = program.space, start(program.space)
    names, arrived, operations = [""] * space.requests, 0, []
    hits = np.zeros(space.requests, np.int32)
    for move in moves:
        ledger = np.asarray(unpack(space, world).ledger)
        if move[0] == Code.REQUEST:
            arrived += 1
            names[move[1]] = f"r{arrived}"
        looked = move[0] == Code.ALLOCATE and ledger[move[1], Fact.FOCUS] == LOOKED_UP
        operations.append(to_log(move, ledger, int(hits[move[1]]) if looked else 0, names))
        worlds = np.broadcast_to(world, (chunk, len(world)))
        outcome = program(worlds, np.broadcast_to(move, (chunk, 4)))
        world, hits = np.asarray(outcome.world[0]), np.asarray(outcome.hits[0])
    return operations
