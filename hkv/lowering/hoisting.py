"""Loops lose what does not change in them: it is computed once, before each.

A read may be done where the text would not have come to it: it has no effect, and a place that there is not is clamped.
Inner loops come first, so that a number leaves as many loops as it can; no number leaves a branch that a program jumps
over.
"""

from __future__ import annotations

from typing import Any

from hkv.lowering.code import Block, Branch, Loop, Op, Read, effects_of
from hkv.lowering.values import Num


def hoist(block: Block) -> None:
    """Moves numbers out of the loops of a block, in front of each."""
    items = list[Any]()
    for item in block.items:
        if isinstance(item, Branch):
            for _, arm in item.arms:
                hoist(arm)
        elif isinstance(item, Loop):
            hoist(item.body)
            if item.test:
                hoist(item.test[0])
            items += _left(item)
        items.append(item)
    _replaced(block, items)


def _left(loop: Loop) -> list[Any]:
    """Takes out of a loop what does not change in it."""
    writes, moved = effects_of(loop).writes, list[Any]()
    inside = {inner for inner, *_ in loop.carried} | ({loop.index[0]} if loop.index else set())

    def leave(block: Block) -> None:
        kept = list[Any]()
        for item in block.items:
            args = item.args if isinstance(item, Op) else (item.at,) if isinstance(item, Read) else None
            if args is None or inside.intersection(x for x in args if isinstance(x, Num)):
                stays = True
            else:
                stays = isinstance(item, Read) and item.array in writes
            if not stays:
                moved.append(item)
                continue
            inside.update(_defined(item))
            if isinstance(item, Branch) and effects_of(item).straight:
                for _, arm in item.arms:
                    leave(arm)
            kept.append(item)
        _replaced(block, kept)

    for block in (*(loop.test or ())[:1], loop.body):
        leave(block)
    return moved


def _defined(item: Any) -> list[Num]:
    """Numbers that an instruction gives to those behind it, or to those in it."""
    if isinstance(item, Op | Read):
        return [item.out]
    if isinstance(item, Branch):
        return [out for out, _, _ in item.joins]
    if isinstance(item, Loop):
        return [out for *_, out in item.carried]
    return []


def _replaced(block: Block, items: list[Any]) -> None:
    """A block has other instructions."""
    block.items, block.effects = [], type(block.effects)()
    for item in items:
        block.put(item)
