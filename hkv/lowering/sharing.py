"""A number is computed once: what is computed or read again, where nothing was written between, is what it was before.

An element that was just written is what was written. Numbers of a branch or of a trip are none outside it.
"""

from __future__ import annotations

from typing import Any

from hkv.lowering.code import Block, Branch, Loop, Op, Read, Write, effects_of
from hkv.lowering.values import Num


def share(block: Block, kept: list[Any]) -> list[Any]:
    """Leaves out what a program computes twice; those of its numbers that `kept` names."""
    sharing = Sharing()
    sharing.block(block, {})
    return [sharing.now(x) for x in kept]


class Sharing:
    """Numbers that were left out, and those in their place."""

    def __init__(self) -> None:
        self._instead = dict[Num, Any]()

    def now(self, x: Any) -> Any:
        """A number, or the one in its place."""
        while isinstance(x, Num) and x in self._instead:
            x = self._instead[x]
        return x

    def block(self, block: Block, found: dict[Any, Any]) -> None:
        """Instructions one after the other; `found`: numbers that are there already, by how they are made."""
        now, items = self.now, block.items
        block.items, block.effects = [], type(block.effects)()
        for item in items:
            if isinstance(item, Op | Read):
                if isinstance(item, Op):
                    item.args = tuple(map(now, item.args))
                    key: Any = (item.how, *((x.__class__, x) for x in item.args))
                else:
                    item.at = now(item.at)
                    key = item.array, item.at
                if key in found:
                    self._instead[item.out] = found[key]
                    continue
                found[key] = item.out
            elif isinstance(item, Write):
                item.at, item.value, item.on = map(now, (item.at, item.value, item.on))
                self._written(found, {item.array})
                if item.on is True:
                    found[item.array, item.at] = item.value
            elif isinstance(item, Branch):
                item.arms = [(now(test), arm) for test, arm in item.arms]
                for _, arm in item.arms:
                    self.block(arm, dict(found))
                item.joins = [(out, [*map(now, inner)], now(old)) for out, inner, old in item.joins]
                self._written(found, effects_of(item).writes)
            else:
                self._loop(item, found)
            block.put(item)

    def _loop(self, loop: Loop, found: dict[Any, Any]) -> None:
        now = self.now
        self._instead |= dict(loop.same)
        loop.same, loop.go = [], now(loop.go)
        if loop.index:
            loop.index = loop.index[0], now(loop.index[1]), now(loop.index[2]), loop.index[3]
        self._written(found, effects_of(loop).writes)
        if loop.test:
            self.block(loop.test[0], dict(found))
            loop.test = loop.test[0], now(loop.test[1])
        self.block(loop.body, dict(found))
        loop.again = now(loop.again)
        loop.carried = [(inner, now(first), now(last), out) for inner, first, last, out in loop.carried]

    @staticmethod
    def _written(found: dict[Any, Any], arrays: Any) -> None:
        for key in [key for key in found if key[0] in arrays]:
            del found[key]
