"""A rule at work: statements, which are read into instructions, branches and loops.

What is under a condition is read as if the condition held: nothing in it asks again. What follows a `return`, `break`
or `continue` under a condition is under the opposite of it: the local LIVE.
"""

from __future__ import annotations

import ast
from typing import Any

from hkv.lowering.code import OPERATIONS, Write
from hkv.lowering.expressions import DONE, LIVE, RESULT, STOP, VALUE, Expressions
from hkv.lowering.values import NONE, MismatchError, Row, is_number, numbers, told
from reference.language import clause
from reference.language.clauses import seldom


class Statements(Expressions):
    """Locals of a rule, and its statements. Branches and loops are `hkv.lowering.loops`."""

    def block(self, body: list[ast.stmt]) -> None:
        for s in body:
            if self.vars[LIVE] is False:
                return
            try:
                self._step(s)
            except MismatchError as mismatch:
                raise self.fail(s, mismatch) from None

    def _step(self, s: ast.stmt) -> None:
        code = self.code
        match s:
            case ast.Pass() | ast.Assert() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if self.rule.__globals__.get(name) is clause:
                pass
            case ast.Assign(targets=[target], value=value):
                self.assign(target, self.eval(value))
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                self.assign(target, self._annotated(s.annotation, self.eval(value)))
            case ast.AugAssign() if type(s.op) in OPERATIONS:
                place = self.place(s.target)
                self.store(place, code.join(type(s.op), self.load(place), self.eval(s.value)))
            case ast.If():
                test = code.truth(self.eval(s.test))
                bodies = [lambda body=body: self.block(body) for body in (s.body, s.orelse) if body]
                self.branch(test, *bodies, seldom=self._is_seldom(s.test))
            case ast.While(orelse=[]):
                self.loop(s.body, s.test)
            case ast.For(orelse=[]):
                self.over(s)
            case ast.Return():
                value = self.eval(s.value) if s.value else NONE
                self.vars[RESULT] = code.select(self.vars[LIVE], value, self.vars.get(RESULT, value))
                self._leave(DONE)
            case ast.Break():
                self._leave(STOP)
            case ast.Continue():
                self._leave()
            case ast.Expr(value=ast.Call()):
                self.eval(s.value)
            case _:
                raise MismatchError("a statement that cannot be lowered")

    def _leave(self, flag: str = VALUE) -> None:
        """The rest is left out, with a note of it."""
        if flag != VALUE:
            self.vars[flag] = self.code.either(self.vars[flag], self.vars[LIVE])
        self.vars[LIVE] = False

    def _is_seldom(self, e: ast.expr) -> bool:
        name = e.func.id if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) else ""
        return self.rule.__globals__.get(name) is seldom

    def _annotated(self, annotation: ast.expr, value: Any) -> Any:
        """A local's first value; the annotation says of which table None is."""
        kind = eval(ast.unparse(annotation), self.rule.__globals__) if value is NONE else None
        return Row(0, self.code.layout.table_of(kind)) if isinstance(kind, type) else value

    def assign(self, target: ast.expr, value: Any) -> None:
        """Gives places a value."""
        if not isinstance(target, ast.Tuple):
            self.store(self.place(target), value)
        elif not isinstance(value, tuple) or len(value) != len(target.elts):
            raise MismatchError(f"expected {len(target.elts)} values, got {told(value)}")
        else:
            for each, part in zip(target.elts, value, strict=True):
                self.assign(each, part)

    def store(self, place: Any, value: Any) -> None:
        """Gives a place a value."""
        layout, code = self.code.layout, self.code
        if isinstance(place, str) and not place.startswith("."):
            self.vars[place] = code.select(self.vars[LIVE], value, self.vars[place]) if self._keeps(place) else value
        elif isinstance(place, str):
            name = place[1:]
            if name in layout.settings or name in code.static:
                raise MismatchError(f"{name} is a setting, which rules do not write")
            value = self._fits(layout.scalars[name], value)
            self.vars[place] = code.select(self.on(), value, self.vars[place])
        elif len(place) == 1:
            raise MismatchError(f"{told(place[0])} is no place of a value")
        else:
            array, at = place
            code.block.put(Write(array, at, numbers(self._fits(layout.arrays[array].held, value))[0], self.on()))

    def _keeps(self, name: str) -> bool:
        """True of a local that has a value, which it keeps where this point is not reached."""
        return self.vars[LIVE] is not True and not isinstance(self.vars.get(name, NotImplementedError()), Exception)

    def _fits(self, held: type, value: Any) -> Any:
        """A value as what an array or scalar holds."""
        if held is int and is_number(value):
            return value
        if held is not int and isinstance(value, Row) and value.table in ("", self.code.layout.table_of(held)):
            return Row(value.number, self.code.layout.table_of(held))
        raise MismatchError(
            f"expected {'a number' if held is int else f'a {held.__name__} or None'}, got {told(value)}"
        )

    def loop(self, body: list[ast.stmt], test: ast.expr | None = None) -> None:
        """Reads a body that is done again and again."""
        raise NotImplementedError

    def over(self, s: ast.For) -> None:
        """Reads a loop over a range or a tuple."""
        raise NotImplementedError
