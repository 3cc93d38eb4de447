"""Two engines side by side: an engine that performs everything twice and stops at the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hkv.dialects.vllm.engines.engine import KeyedEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, CacheEvent, CacheState, ExtraKeys, Hit
from hkv.replay.difference import Difference

Value = TypeVar("Value")


class LockstepEngine:
    """A `KeyedEngine` that performs every operation on two engines.

    Compared: hits and their blocks, the blocks of every allocation, refusals, free blocks, copies, resets, state.
    Answers are the first engine's, as is every attribute that is not an operation.

    Args:
      engine: the engine in question.
      reference: the engine it is held against, empty too.
      names: of both.
    """

    def __init__(self, engine: KeyedEngine, reference: KeyedEngine, names: tuple[str, str]) -> None:
        self._engine = engine
        self._reference = reference
        self._names = names
        self._number = 0

    def step(self) -> None:
        self._number += 1
        self._engine.step()
        self._reference.step()

    def request(self, id: str, tokens: Sequence[int], extra: ExtraKeys | None) -> None:
        self._number += 1
        self._engine.request(id, tokens, extra)
        self._reference.request(id, tokens, extra)

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        self._number += 1
        self._engine.request_keyed(id, num_tokens, keys)
        self._reference.request_keyed(id, num_tokens, keys)

    def lookup(self, id: str) -> Hit:
        mine, other = self._engine.lookup(id), self._reference.lookup(id)
        self._number += 1
        for field in ("hit", "blocks", "shared_prefix"):
            self._same("lookup", id, field, getattr(mine, field), getattr(other, field))
        return mine

    def allocate(self, operation: AllocateOp) -> Allocation:
        mine, other = self._engine.allocate(operation), self._reference.allocate(operation)
        self._number += 1
        self._same("allocate", operation.id, "refused", mine.blocks is None, other.blocks is None)
        self._same("allocate", operation.id, "blocks", mine.blocks, other.blocks)
        return mine

    def advance(self, id: str, tokens: int) -> None:
        self._number += 1
        self._engine.advance(id, tokens)
        self._reference.advance(id, tokens)

    def append(self, id: str, tokens: Sequence[int]) -> None:
        self._number += 1
        self._engine.append(id, tokens)
        self._reference.append(id, tokens)

    def extend(self, id: str, tokens: int) -> None:
        self._number += 1
        self._engine.extend(id, tokens)
        self._reference.extend(id, tokens)

    def commit(self, id: str, tokens: int) -> None:
        self._number += 1
        self._engine.commit(id, tokens)
        self._reference.commit(id, tokens)

    def free(self, id: str) -> None:
        self._number += 1
        self._engine.free(id)
        self._reference.free(id)
        self._same("free", id, "free blocks", self._engine.num_free(), self._reference.num_free())

    def drop(self, id: str) -> None:
        self._number += 1
        self._engine.drop(id)
        self._reference.drop(id)

    def evict(self, blocks: Sequence[int]) -> None:
        self._number += 1
        self._engine.evict(blocks)
        self._reference.evict(blocks)

    def copies(self) -> list[tuple[int, int]]:
        self._number += 1
        return self._same("copies", "", "copies", self._engine.copies(), self._reference.copies())

    def reset(self) -> bool:
        self._number += 1
        return self._same("reset", "", "ok", self._engine.reset(), self._reference.reset())

    def events(self) -> list[CacheEvent]:
        self._number += 1
        self._reference.events()
        return self._engine.events()

    def state(self) -> CacheState:
        self._number += 1
        mine, other = self._engine.state(), self._reference.state()
        for field in ("free", "refs", "rows"):
            self._same("state", "", field, getattr(mine, field), getattr(other, field))
        return mine

    def num_free(self) -> int:
        self._number += 1
        return self._same("num_free", "", "free blocks", self._engine.num_free(), self._reference.num_free())

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def _same(self, operation: str, request: str, field: str, mine: Value, other: Value) -> Value:
        if mine != other:
            answers: dict[str, object] = dict(zip(self._names, (mine, other), strict=True))
            raise Difference(self._number, operation, request, field, answers)
        return mine
