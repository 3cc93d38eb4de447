"""A rule at work: branches and loops.

A body is read on its own, with other numbers for all that it may change; what it did change is what leaves it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from hkv.lowering.code import Branch, Loop, Op, Read, among, is_condition
from hkv.lowering.expressions import DONE, LIVE, RESULT, STOP, VALUE
from hkv.lowering.statements import Statements
from hkv.lowering.values import MismatchError, Num, blank, is_number, mapped, matched, numbers, told

TURN, TUPLE = "·turn", "·tuple"
"""Locals of the lowering: the values of a loop over a tuple, and which is at hand."""


class Frame(Statements):
    """Locals of a rule, with all its statements."""

    def branch(self, test: Any, *bodies: Callable[[], Any], seldom: bool = False) -> None:
        if isinstance(test, bool):
            for body in bodies[0 if test else 1 :][:1]:
                body()
            return
        code, before, on, outer, since = self.code, self.vars, self.on(), self.outer, Num().serial
        tests = (test, code.negation(test))[: len(bodies)]
        found, ends = Branch([], [], seldom), list[dict[str, Any]]()
        for body, taken in zip(bodies, tests, strict=True):
            self.vars, self.outer = {**before, LIVE: True}, True
            with code.inside() as block:
                body()
            found.arms.append((code.both(on, taken), block))
            ends.append(self.vars)
        self.vars, self.outer, started = before, outer, {**before, LIVE: True}
        if apart := not all(isinstance(item, Op | Read) for _, block in found.arms for item in block.items):
            code.block.put(found)
        else:
            for _, block in found.arms:
                code.block.items += block.items
                code.block.effects.add(block.effects)
        after = dict(before)
        for name in dict.fromkeys(name for end in ends for name in end):
            old, values = started.get(name), [end.get(name, started.get(name)) for end in ends]
            if any(value is not old for value in values):
                own = tests if name in (LIVE, VALUE) else tuple(on for on, _ in found.arms)
                try:
                    after[name] = self._joined(
                        found, since if apart else None, own, own is tests or on is True, values, old
                    )
                except MismatchError as mismatch:  # of what may never be used
                    after[name] = mismatch
        after[LIVE] = code.both(before[LIVE], after[LIVE]) if after[LIVE] is not before[LIVE] else before[LIVE]
        self.vars = after

    def _joined(self, found: Branch, since: int | None, tests: Any, complete: bool, values: list[Any], old: Any) -> Any:
        """A local after blocks of which each gave it a value, or left it as it was: `old`, None for nothing."""
        given = [value for value in (*values, old) if value is not None]
        shape = given[0]
        for value in given:
            if isinstance(value, MismatchError):
                return value
            shape = matched(shape, value, lambda one, _: one)
        count = len(numbers(shape))
        leaves = zip(*([None] * count if value is None else numbers(value) for value in (*values, old)), strict=True)

        def leaf(_: Any) -> Any:
            *inner, otherwise = next(leaves)
            if since is not None and any(isinstance(x, Num) and x.serial > since for x in inner):
                known = [0 if x is None else x for x in inner] + ([] if otherwise is None else [otherwise])
                out = Num(all(x is None or is_condition(x) for x in (*inner, otherwise)), among(*known))
                found.joins.append((out, [0 if x is None else x for x in inner], otherwise))
                return out
            if len(inner) == 2 and complete and None not in inner:
                return self.code.select(tests[0], *inner)
            for test, x in reversed(list(zip(tests, inner, strict=True))):
                if x is not None:
                    otherwise = x if otherwise is None else self.code.select(test, x, otherwise)
            return otherwise

        return mapped(shape, leaf)

    def loop(self, body: list[ast.stmt], test: ast.expr | None = None, index: Any = None) -> None:
        code, before, on, outer = self.code, dict(self.vars), self.on(), self.outer
        named, returns = assigned(body), any(isinstance(n, ast.Return) for s in body for n in ast.walk(s))
        if index and index[0] in named:
            raise MismatchError(f"{index[0]} is the loop's own variable")
        changing = [n for n in before if n in named or self._is_written(n) or (n == RESULT and returns)]
        shapes = {n: before[n] for n in changing if not isinstance(before[n], MismatchError)}
        while True:  # until it is known what kinds of values the body changes
            inner = {n: mapped(x, lambda _: Num()) for n, x in shapes.items()}
            turn = Num()
            self.vars, self.outer = {**before, **inner, LIVE: True, DONE: False, STOP: False}, True
            self.vars |= {index[0]: turn} if index else {}
            with code.inside() as asked:
                more = True if test is None else code.truth(self.eval(test))
            alters = asked.effects.writes or any(self.vars[n] is not x for n, x in inner.items())
            with code.inside() as block:
                self.block(body)
                again = code.negation(code.either(self.vars[STOP], self.vars[DONE]))
            after, self.outer = self.vars, outer
            spoiled = {n: after[n] for n in shapes if isinstance(after[n], MismatchError)}
            kinds = {n: matched(x, after[n], lambda one, _: one) for n, x in shapes.items() if n not in spoiled}
            if RESULT in after and RESULT not in before:
                before[RESULT] = kinds[RESULT] = blank(after[RESULT])
            if test is not None and (alters or asked.effects.reads & block.effects.writes):
                leave = ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], [])
                body, test = [ast.fix_missing_locations(ast.copy_location(leave, test)), *body], None
            elif kinds == shapes:
                break
            before, shapes = before | spoiled, kinds
        self.vars = before
        if more is False:
            return
        found = Loop(on, block, again, [], [], (asked, more) if more is not True else None, None)
        found.index = (turn, *index[1:]) if index else None

        def leaf(numbers: Any) -> Any:
            within, first, last = numbers
            if last is within:
                found.same.append((within, first))
                return first
            found.carried.append((within, first, last, Num()))
            return found.carried[-1][-1]

        for name, shape in shapes.items():
            leaves = zip(*map(numbers, (inner[name], shape, after[name])), strict=True)
            before[name] = mapped(shape, lambda _, leaves=leaves: leaf(next(leaves)))
        done, returned = Num(True), after[DONE] is not False
        if returned:
            found.carried.append((Num(True), False, after[DONE], done))
        code.block.put(found)
        if returned:
            before |= {DONE: code.either(before[DONE], done), LIVE: code.both(before[LIVE], code.negation(done))}
        if more is True and not index and after[STOP] is False:
            before[LIVE] = False  # only a return leaves it

    def _is_written(self, name: str) -> bool:
        """True of a scalar that rules may write."""
        scalar = name[1:] if name.startswith(".") else ""
        return bool(scalar) and scalar not in self.code.layout.settings and scalar not in self.code.static

    def over(self, s: ast.For) -> None:
        targets = [n.id for n in ast.walk(s.target) if isinstance(n, ast.Name)]
        if not all(isinstance(n, ast.Name | ast.Tuple | ast.expr_context) for n in ast.walk(s.target)):
            raise MismatchError("a loop gives locals their values")
        if isinstance(s.iter, ast.Call) and isinstance(s.iter.func, ast.Name) and s.iter.func.id == "range":
            self._over_range(s, s.iter)
        else:
            self._over_tuple(s)
        self.vars |= dict.fromkeys(targets, MismatchError("a loop's own variable, which it may never have had"))

    def _over_range(self, s: ast.For, e: ast.Call) -> None:
        given = list(map(self.eval, e.args))
        start, end, step = (0, *given, 1) if len(given) == 1 else (*given, 1) if len(given) == 2 else given
        if not (isinstance(s.target, ast.Name) and step in (1, -1) and is_number(start) and is_number(end)):
            raise MismatchError("expected a local and a range that counts up or down by 1")
        known = range(start, end, step) if isinstance(start, int) and isinstance(end, int) else range(2)
        if len(known) < 2:  # XLA does away with loops of one trip, and with what they are for
            self._unrolled(s, known)
        else:
            self.loop(s.body, index=(s.target.id, start, end, step))

    def _over_tuple(self, s: ast.For) -> None:
        values, held = self.eval(s.iter), self.vars
        if not isinstance(values, tuple):
            raise MismatchError(f"a loop over neither a range nor a tuple: {told(values)}")
        try:
            shape = values and values[0]
            for value in values:
                shape = matched(shape, value, lambda one, _: one)
            alike = len(values) > 1 and bool(numbers(shape))
        except MismatchError:
            alike = False
        if alike:
            item = ast.Subscript(ast.Name(TUPLE, ast.Load()), ast.Name(TURN, ast.Load()), ast.Load())
            chosen = ast.fix_missing_locations(ast.copy_location(ast.Assign([s.target], item), s))
            self.vars = {**held, TUPLE: values}
            with self.code.inside() as trial:
                self.loop([chosen, *s.body], index=(TURN, 0, len(values), 1))
            if not next(item for item in trial.items if isinstance(item, Loop)).body.effects.straight:
                for item in trial.items:
                    self.code.block.put(item)
                del self.vars[TUPLE]
                return
        self.vars = held
        self._unrolled(s, values)

    def _unrolled(self, s: ast.For, values: Iterable[Any]) -> None:
        """Reads a body for one value after the other."""
        code, (live, done, stop) = self.code, (self.vars[name] for name in (LIVE, DONE, STOP))
        self.vars |= {DONE: False, STOP: False}
        for value in values:
            self.vars[LIVE] = True
            self.assign(s.target, value)
            self.vars[LIVE] = code.both(live, code.negation(code.either(self.vars[STOP], self.vars[DONE])))
            self.block(s.body)
        self.vars[LIVE] = code.both(live, code.negation(self.vars[DONE]))
        self.vars |= {DONE: code.either(done, self.vars[DONE]), STOP: stop}


def assigned(body: list[ast.stmt]) -> set[str]:
    """Locals that statements give a value."""
    return {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
