"""Instructions become JAX: segments of reads, the writes behind them, loops.

XLA updates an array of a loop in place only if it can tell that each read of it comes before the write that follows,
and if no fusion does both. So reads stand in a `lax.cond`: as many instructions as read nothing that one of them
writes. Only numbers leave it: those that are used later, and where each write goes and what it writes. The writes
follow; one that must not happen goes to the spare element. A segment that writes waits for those before it that read
the same array. XLA also does away with conditions that it can know: a number that changes is part of each segment's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from hkv.lowering.code import OPERATIONS, Block, Branch, Effects, Loop, Op, Read, Write, effects_of
from hkv.lowering.values import Num
from reference.language import Layout

PHASE = 12
"""Writes from which on a branch is a loop of at most one trip; others are predicated."""

SKIP = 12
"""Instructions from which on a branch that only reads is passed over where it is not taken."""

IMPOSSIBLE = -(2**31)
"""A number that no rule computes, which XLA does not know."""


def i32(v: Any) -> Any:
    """A number as a traced int32."""
    if isinstance(v, int):
        return lax.full((), int(v), jnp.int32)
    return v if v.dtype == jnp.int32 else lax.convert_element_type(v, jnp.int32)


def begun(v: Any) -> Any:
    """A number as a loop begins with it: not the very constant, lest XLA knows what it is."""
    return lax.optimization_barrier(i32(v)) if isinstance(v, int) else i32(v)


def truth(v: Any) -> Any:
    """A number as a condition."""
    return bool(v) if isinstance(v, int) else v if v.dtype == jnp.bool_ else lax.ne(v, 0)


def both(a: Any, b: Any) -> Any:
    """A condition: both hold."""
    if isinstance(a, bool) or isinstance(b, bool):
        return (b if a else False) if isinstance(a, bool) else a if b else False
    return lax.bitwise_and(a, b)


def select(p: Any, a: Any, b: Any) -> Any:
    """One of two numbers."""
    if isinstance(p, bool) or a is b:
        return a if p is not False else b
    alike = all(hasattr(x, "dtype") for x in (a, b)) and a.dtype == b.dtype
    return lax.select(p, a, b) if alike else lax.select(p, i32(a), i32(b))


def differs(number: Any) -> Any:
    """A condition that holds, as no rule computes that number, but that XLA does not know to hold."""
    return lax.ne(i32(number), i32(IMPOSSIBLE))


class Emission:
    """A trace in progress.

    Attributes:
      arrays: as they are now. opaque: a condition that always holds, and that XLA does not know. lane: which of several
      caches, and how many lie one after the other. env: traced numbers. last: the last instruction that uses one.
      changing: arrays that the loop at hand changes. within: those that loops around it change. pending: of an array,
      numbers of the segments that read it, which a write has to wait for. noted: inside a segment, the writes that
      follow it. targets: their places, by what makes them.
    """

    def __init__(self, layout: Layout, arrays: Mapping[str, Any], opaque: Any, lane: tuple[Any, int] = (0, 1)) -> None:
        self.layout, self.arrays, self.opaque, self.lane = layout, dict(arrays), opaque, lane
        self.env, self.last = dict[Num, Any](), dict[Num, int]()
        self.changing, self.pending = set(layout.arrays), dict[str, list[Any]]()
        self.noted: list[Any] | None = None
        self.targets = dict[Any, Any]()
        self.within = set[str]()
        self.place: dict[int, int] = {}

    def emit(self, block: Block, given: Mapping[Num, Any], kept: list[Any]) -> list[Any]:
        """Traces a program; the values of some of its numbers after it."""
        self.use(*kept)
        self.mark(block)
        self.env |= given
        self.run(block, True)
        return [self.value(x) for x in kept]

    def value(self, x: Any) -> Any:
        """A number, traced if it is not known."""
        return self.env[x] if isinstance(x, Num) else x

    def forget(self, known: int) -> None:
        """Forgets all numbers but the first: those of a segment or trip are none outside it."""
        while len(self.env) > known:
            self.env.popitem()

    # What is used where.

    def use(self, *numbers: Any) -> None:
        """Numbers that the instruction at hand uses, the last one that does."""
        for x in numbers:
            if isinstance(x, Num):
                self.last.setdefault(x, 1 - len(self.place))

    def mark(self, block: Block) -> None:
        """Numbers instructions from the last to the first, and leaves out what nobody uses."""
        kept = list[Any]()
        for item in reversed(block.items):
            self.place[id(item)] = -len(self.place)
            if isinstance(item, Op | Read):
                if item.out not in self.last:
                    continue
                self.use(*(item.args if isinstance(item, Op) else (item.at,)))
            elif isinstance(item, Write):
                self.use(item.at, item.value, item.on)
            elif isinstance(item, Branch):
                item.joins = [join for join in item.joins if join[0] in self.last]
                for _, inner, old in item.joins:
                    self.use(*inner, old)
                self.use(*(test for test, _ in item.arms))
                for _, arm in item.arms:
                    self.mark(arm)
            else:
                self.use(item.go, item.again, *(x for _, first, last, _ in item.carried for x in (first, last)))
                self.use(*(outside for _, outside in item.same), *((item.index or ())[1:3]))
                for each in (item.body, *(item.test or ())[:1]):
                    self.use(*(item.test or ())[1:])
                    self.mark(each)
            kept.append(item)
        block.items, block.effects = [], Effects()
        for item in reversed(kept):
            block.put(item)

    # Arrays.

    def at(self, name: str, at: Any) -> tuple[Any]:
        """The place of a number; of several caches one after the other, the lane's."""
        lane, count = self.lane
        place = i32(at)
        if count > 1:
            place = lax.add(place, lax.mul(lane, i32(self.arrays[name].shape[0] // count)))
        return (lax.convert_element_type(place, jnp.uint32),)  # of which XLA need not ask if it is below 0

    def read(self, name: str, at: Any) -> Any:
        """A number of an array."""
        found = lax.dynamic_slice(self.arrays[name], self.at(name, at), (1,), allow_negative_indices=False)
        return found.reshape(())

    def write(self, name: str, at: Any, value: Any) -> None:
        """Puts a number into an array."""
        value, place = i32(value).reshape(1), self.at(name, at)
        array = lax.dynamic_update_slice(self.arrays[name], value, place, allow_negative_indices=False)
        self.arrays[name] = array

    def spare(self, name: str) -> int:
        """The place of a write that must not happen: None, or behind the places of an array."""
        return 0 if self.layout.arrays[name].table else self.arrays[name].shape[0] // self.lane[1] - 1

    def waiting(self, found: Effects) -> Any:
        """Holds, and is known only once that is which segments read of the arrays to be written."""
        waits: Any = True
        for token in {id(t): t for name in sorted(found.writes) for t in self.pending.pop(name, ())}.values():
            waits = both(waits, differs(token))
        return waits

    def noting(self, found: Effects, token: Any) -> None:
        """Whoever writes what was read has to wait for a number of the segment that read it."""
        for name in sorted(found.reads & self.changing - found.writes):
            self.pending.setdefault(name, []).append(token)

    # Inside a segment.

    def inside(self, items: list[Any], p: Any) -> None:
        """Traces instructions of which none reads what one before it writes."""
        value, env = self.value, self.env
        for item in items:
            if isinstance(item, Read):
                env[item.out] = self.read(item.array, value(item.at))
            elif isinstance(item, Op):
                env[item.out] = self.computed(item.how, *map(value, item.args))
            elif isinstance(item, Write):
                assert self.noted is not None
                self.noted.append((item.array, self.target(item, p), value(item.value)))
            elif isinstance(item, Branch):
                if any(not arm.effects.writes and size(arm) >= SKIP for _, arm in item.arms):
                    self.skipped(item, p)
                    continue
                for test, arm in item.arms:
                    self.inside(arm.items, both(p, value(test)))
                for out, inner, old in item.joins:
                    found = self.joined(item, inner, value(old) if old is not None else None)
                    env[out] = truth(found) if out.boolean else found
            else:
                self.loop(item, p)

    def target(self, item: Write, p: Any) -> Any:
        """The place of a write inside a segment: the same number for all that go, or do not go, to one place."""
        spare = self.spare(item.array)
        key = id(p), item.on, item.at, spare
        if key not in self.targets:
            self.targets[key] = p, select(both(p, self.value(item.on)), self.value(item.at), spare)
        return self.targets[key][1]

    def skipped(self, item: Branch, p: Any) -> None:
        """Traces a branch inside a segment: blocks that read much are passed over where they are not taken."""
        value, env = self.value, self.env
        current = [value(old) if old is not None else None for _, _, old in item.joins]
        for k, (test, arm) in enumerate(item.arms):
            taken = both(p, value(test))
            numbers = [inner[k] for _, inner, _ in item.joins]
            if arm.effects.writes or size(arm) < SKIP:
                self.inside(arm.items, taken)
                current = [
                    value(x) if y is None else select(value(test), value(x), y)
                    for x, y in zip(numbers, current, strict=True)
                ]
                continue

            def done(arm: Block = arm, numbers: list[Any] = numbers) -> list[Any]:
                known = len(env)
                self.inside(arm.items, True)
                out = [i32(value(x)) for x in numbers]
                self.forget(known)
                return out

            otherwise = [i32(0 if x is None else x) for x in current]
            current = lax.cond(taken, done, lambda otherwise=otherwise: otherwise)
        for (out, _, _), x in zip(item.joins, current, strict=True):
            env[out] = truth(x) if out.boolean else x

    def joined(self, item: Branch, inner: list[Any], found: Any) -> Any:
        """A number after a branch."""
        for (test, _), x in reversed(list(zip(item.arms, inner, strict=True))):
            found = self.value(x) if found is None else select(self.value(test), self.value(x), found)
        return found

    def computed(self, how: Any, *args: Any) -> Any:
        """A number computed of others."""
        if how == "select":
            return select(*args)
        if how in ("and", "or", "not"):
            logic = {"and": lax.bitwise_and, "or": lax.bitwise_or, "not": lax.bitwise_not}[how]
            return logic(*(x if hasattr(x, "dtype") else lax.full((), bool(x), jnp.bool_) for x in map(truth, args)))
        return OPERATIONS[how][1](*map(i32, args))

    # Between segments.

    def run(self, block: Block, p: Any) -> None:
        """Traces instructions, in as few segments as there can be."""
        items, joined = list[Any](), Effects()
        for item in block.items:
            found = effects_of(item)
            if items and (not found.straight or found.reads & joined.writes):
                self.segment(items, joined, p)
                items, joined = [], Effects()
            if found.straight:
                items.append(item)
                joined.add(found)
            elif isinstance(item, Loop):
                self.loop(item, p)
            else:
                self.open(item, p)
        if items:
            self.segment(items, joined, p)

    def segment(self, items: list[Any], found: Effects, p: Any) -> None:
        """Traces instructions whose reads come before all their writes."""
        held, self.noted, self.targets = self.noted, [], {}
        # What only a loop around this one changes needs no segment, but where XLA could fuse it with a write.
        if not found.reads & (self.changing | self.within if found.writes else self.changing):
            self.inside(items, p)
            writes, self.noted, waits = self.noted, held, self.waiting(found)
            for name, at, value in writes:
                self.write(name, select(waits, at, self.spare(name)), value)
            return
        end, inside = self.place[id(items[-1])], set(defined(items))
        leaving = [x for x in inside if self.last.get(x, end) > end]
        leaving.sort(key=lambda x: x.serial)
        writes = list(written(items))

        slots, others = list[int](), list[int]()

        def numbers() -> list[Any]:
            self.noted, known, out = [], len(self.env), dict[Any, Any]()

            def leave(x: Any, other: int) -> None:
                """A number leaves once, however many need it; where the segment is passed over it is `other`."""
                if (key := (id(x), other)) not in out:
                    out[key] = len(out), x
                    others.append(other)
                slots.append(out[key][0])

            self.inside(items, True)
            for x in leaving:
                leave(self.value(x), 0)
            for w, (_, at, value) in zip(writes, self.noted, strict=True):
                leave(at, self.spare(w.array))
                if w.value in inside:
                    leave(value, 0)
            self.forget(known)
            return [i32(x) for _, x in out.values()]

        if leaving or writes:
            on = both(both(self.opaque, p), self.waiting(found))
            left = lax.cond(on, numbers, lambda: [i32(x) for x in others])
            out = iter([left[n] for n in slots])
            for x in leaving:
                self.env[x] = next(out)
            token = left[0]
            for w in writes:
                at = next(out)
                self.write(w.array, at, next(out) if w.value in inside else self.value(w.value))
            self.noting(found, token)
            for x in leaving:
                self.env[x] = truth(self.env[x]) if x.boolean else self.env[x]
        self.noted, self.targets = held, {}

    def open(self, item: Branch, p: Any) -> None:
        """Traces a branch that is no segment."""
        current = [self.value(old) if old is not None else None for _, _, old in item.joins]
        for k, (test, arm) in enumerate(item.arms):
            taken = both(p, self.value(test))
            inner = [inner[k] for _, inner, _ in item.joins]
            if (item.seldom and k == 0) or arm.effects.loops or arm.effects.weight >= PHASE:
                out = [Num(join[0].boolean) for join in item.joins]
                firsts = [0 if x is None else x for x in current]
                carried = list(zip((Num() for _ in out), firsts, inner, out, strict=True))
                self.loop(Loop(True, arm, False, carried, [], None, None), taken)
                current = [self.env[x] for x in out]
            else:
                self.run(arm, taken)
                current = [
                    self.value(x) if y is None else select(self.value(test), self.value(x), y)
                    for x, y in zip(inner, current, strict=True)
                ]
        for (out, _, _), x in zip(item.joins, current, strict=True):
            self.env[out] = truth(x) if out.boolean else x

    def loop(self, item: Loop, p: Any) -> None:
        """Traces a `lax.while_loop`."""
        env, value, go = self.env, self.value, both(both(p, self.value(item.go)), True)
        found = effects_of(item)
        go = both(go, self.waiting(found)) if self.noted is None else go
        stops = item.again is not True
        index = item.index
        end = value(index[2]) if index else 0
        if index and not stops:
            end = select(go, i32(end), i32(value(index[1])))
        asks = stops or not (index or go is True) or not (index or item.carried)
        carry = [begun(value(first)) for _, first, _, _ in item.carried]
        carry += [begun(value(index[1]))] if index else []
        carry += [begun(go)] if asks else []
        names = sorted(found.writes)
        held = self.opaque, self.changing, self.within, self.pending, dict(self.arrays)

        def entered(numbers: list[Any], arrays: list[Any]) -> Any:
            """The loop's own numbers; its index; whether it goes on."""
            self.arrays = {**held[-1], **dict(zip(names, arrays, strict=True))}
            for (inner, _, _, _), x in zip(item.carried, numbers, strict=False):
                env[inner] = truth(x) if inner.boolean else x
            for inner, outside in item.same:
                env[inner] = value(outside)
            if index:
                env[index[0]] = numbers[len(item.carried)]

        def goes_on(carry: Any) -> Any:
            known = len(env)
            entered(*carry)
            more = truth(carry[0][-1]) if asks else True
            if index:
                more = both(more, (lax.lt if index[3] == 1 else lax.gt)(env[index[0]], i32(end)))
            if item.test:
                held_noted, self.noted = self.noted, []
                self.inside(item.test[0].items, True)
                self.noted = held_noted
                more = both(more, truth(value(item.test[1])))
            self.forget(known)
            return lax.full((), more, jnp.bool_) if isinstance(more, bool) else more

        def trip(carry: Any) -> Any:
            numbers, known = carry[0], len(env)
            entered(*carry)
            self.opaque = differs(numbers[-1] if stops else numbers[len(item.carried)] if index else numbers[0])
            self.within = held[1] | held[2]
            self.changing, self.pending = set(found.writes), {}
            self.inside(item.body.items, True) if self.noted is not None else self.run(item.body, True)
            after = [i32(value(last)) for _, _, last, _ in item.carried]
            after += [lax.add(numbers[len(item.carried)], i32(index[3]))] if index else []
            after += [i32(value(item.again)) if stops else numbers[-1]] if asks else []
            self.forget(known)
            return after, [self.arrays[name] for name in names]

        numbers, arrays = lax.while_loop(goes_on, trip, (carry, [self.arrays[name] for name in names]))
        self.opaque, self.changing, self.within, self.pending, self.arrays = held
        self.arrays |= dict(zip(names, arrays, strict=True))
        for (_, _, _, out), x in zip(item.carried, numbers, strict=False):
            env[out] = truth(x) if out.boolean else x
        if self.noted is None and numbers:
            self.noting(found, numbers[0])


def size(block: Block) -> int:
    """Number of instructions of a block, those of its branches among them; a loop counts as many."""
    found = 0
    for item in block.items:
        arms = item.arms if isinstance(item, Branch) else []
        found += sum(size(arm) for _, arm in arms) if arms else SKIP if isinstance(item, Loop) else 1
    return found


def defined(items: list[Any]) -> Iterator[Num]:
    """Numbers that instructions compute."""
    for item in items:
        if isinstance(item, Op | Read):
            yield item.out
        elif isinstance(item, Branch):
            yield from (out for out, _, _ in item.joins)
            for _, arm in item.arms:
                yield from defined(arm.items)
        elif isinstance(item, Loop):
            yield from (out for _, _, _, out in item.carried)


def written(items: list[Any]) -> Iterator[Write]:
    """Writes of instructions, in order."""
    for item in items:
        if isinstance(item, Write):
            yield item
        elif isinstance(item, Branch):
            for _, arm in item.arms:
                yield from written(arm.items)
