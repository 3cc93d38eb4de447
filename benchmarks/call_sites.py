"""Instructions by rule and call site: call sites, not rules, make a program large and slow to compile."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Mapping
from types import FunctionType, MappingProxyType

from hkv.lowering import State, read
from hkv.lowering.code import Among, Block, Branch, Loop, Op, Read
from reference.language import Layout


def sites(
    layout: Layout,
    rule: FunctionType,
    state: State,
    given: int = 1,
    static: Mapping[str, int] | None = None,
    among: Among = MappingProxyType({}),
) -> dict[tuple[str, ...], int]:
    """Number of instructions at each call site, those of rules that are called there left out.

    Args:
      layout: of the cache.
      rule: a function of a text.
      state: arrays of the sizes in question.
      given: how many numbers the rule takes.
      static: values of scalars, as `lowered` takes them.
      among: values of arrays, as `lowered` takes them.

    Returns:
      By the names of the rules at work, each with the line of its call, outermost first.
    """
    code = read(layout, rule, static or {}, (), among, state, given).code
    # Calls are nested: of those that begin before a number, the last one that has not ended is whose it is.
    calls = sorted(code.sites, key=lambda call: call[1])
    begins, found, at = [first for _, first, _ in calls], collections.Counter[tuple[str, ...]](), ()

    def count(block: Block) -> None:
        nonlocal at
        for item in block.items:
            if isinstance(item, Op | Read):
                place = bisect.bisect(begins, item.out.serial) - 1
                while place >= 0 and calls[place][2] < item.out.serial:
                    place -= 1
                at = calls[place][0] if place >= 0 else ()
            found[at] += 1
            if isinstance(item, Branch):
                for _, arm in item.arms:
                    count(arm)
            elif isinstance(item, Loop):
                for each in (*(item.test or ())[:1], item.body):
                    count(each)

    count(code.block)
    return dict(found)
