"""A rule at work: expressions and calls, which are read into instructions. Statements are `hkv.lowering.statements`."""

from __future__ import annotations

import ast
import enum
import inspect
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

from hkv.lowering.code import OPERATIONS, Code, checked, is_condition
from hkv.lowering.values import NONE, MismatchError, Num, Path, Row, TextError, is_number, told
from reference.language import Text
from reference.language.clauses import choice, seldom

RESULT, VALUE, LIVE, DONE, STOP = "·result", "·value", "·live", "·done", "·stop"
"""Locals of the lowering: what a rule returns, or an expression is; this point is reached; the rule has returned; a
loop was left. A scalar of the cache is a local, too: its name with a dot before it."""


class Expressions:
    """Locals of a rule, and what is computed of them.

    Attributes:
      rule: the function. vars: locals, and scalars of the cache. outer: the condition under which all that is read now
      happens, if this point of the rule is reached.
    """

    def __init__(self, code: Code, rule: FunctionType, names: dict[str, Any], outer: Any) -> None:
        self.code, self.rule, self.vars, self.outer = code, rule, {LIVE: True, DONE: False, STOP: False, **names}, outer

    def on(self) -> Any:
        """The condition under which the cache changes."""
        return self.code.both(self.outer, self.vars[LIVE])

    def branch(self, test: Any, *bodies: Callable[[], Any], seldom: bool = False) -> None:
        """Reads what happens under a condition, and what under its opposite; a rule may change the cache in both."""
        raise NotImplementedError

    def block(self, body: list[ast.stmt]) -> None:
        """Reads statements one after the other."""
        raise NotImplementedError

    def fail(self, node: ast.AST, message: object) -> TextError:
        """The error of a place."""
        place = f"{self.rule.__code__.co_filename}:{getattr(node, 'lineno', self.rule.__code__.co_firstlineno)}"
        return TextError(f"{place}: {message}: {ast.unparse(node)[:90]}")

    def eval(self, e: ast.expr) -> Any:
        """The value of an expression."""
        try:
            return self._eval(e)
        except MismatchError as mismatch:
            raise self.fail(e, mismatch) from None

    def _eval(self, e: ast.expr) -> Any:
        code = self.code
        match e:
            case ast.Constant(value=None):
                return NONE
            case ast.Constant(value=int() as value):
                return checked(value)
            case ast.Name():
                return self._name(e.id)
            case ast.Attribute() | ast.Subscript():
                return self.load(self.place(e))
            case ast.BinOp() if type(e.op) in OPERATIONS:
                return code.join(type(e.op), self.eval(e.left), self.eval(e.right))
            case ast.UnaryOp(op=ast.USub()):
                return code.join(ast.Sub, 0, self.eval(e.operand))
            case ast.UnaryOp(op=ast.Not()):
                return code.negation(code.truth(self.eval(e.operand)))
            case ast.BoolOp():
                return self._chain(e)
            case ast.Compare():
                return self._compare(e)
            case ast.IfExp():
                test = code.truth(self.eval(e.test))
                return self._either(test, lambda: self.eval(e.body), lambda: self.eval(e.orelse))
            case ast.Tuple():
                return tuple(map(self.eval, e.elts))
            case ast.Call():
                return self._call(e)
        raise MismatchError("an expression that cannot be lowered")

    def _name(self, name: str) -> Any:
        if name in self.vars:
            found = self.vars[name]
            if isinstance(found, MismatchError):
                raise found
            return found
        if name in self.rule.__code__.co_varnames:
            raise MismatchError("not assigned before, or in a loop that may not have run, or a loop's own variable")
        if name in self.rule.__globals__:
            found = self.rule.__globals__[name]
            return NONE if found is None else checked(found) if isinstance(found, int) else found
        if name in BUILTINS:
            return BUILTINS[name]
        raise MismatchError("a name that the text does not have")

    # Places: a local, a scalar, an element of an array; or what is none, a value.

    def place(self, e: ast.expr) -> Any:
        """The place that an expression is: a name of `vars`, or an array and a number; else a tuple of one value."""
        match e:
            case ast.Name():
                return e.id
            case ast.Attribute():
                return self._attribute(self.eval(e.value), e.attr)
            case ast.Subscript():
                return self._item(self.eval(e.value), self.eval(e.slice))
        raise self.fail(e, "a target that cannot be lowered")

    def load(self, place: Any) -> Any:
        """The value at a place."""
        if isinstance(place, str):
            return self._name(place)
        if len(place) == 1:
            return place[0]
        held = self.code.layout.arrays[place[0]].held
        number = self.code.read(*place)
        return number if held is int else Row(number, self.code.layout.table_of(held))

    def _attribute(self, base: Any, attr: str) -> Any:
        layout = self.code.layout
        if isinstance(base, Path):
            name = f"{base.name}.{attr}" if base.name else attr
            if name in layout.scalars:
                return f".{name}"
            if name in layout.parts or name in layout.tables or name in layout.arrays:
                return (Path(name),)
            raise MismatchError(f"{base.name or layout.root.__name__} has no {attr}")
        if isinstance(base, Row):
            name = f"{base.table}.{attr}"
            if name not in layout.arrays:
                hint = "" if base.table else ": an annotation of the local says of which table it is"
                raise MismatchError(f"{told(base)} has no field {attr}{hint}")
            if layout.arrays[name].line:
                return (Path(name, self.code.join(ast.Mult, base.number, self.code.widths[name])),)
            return name, base.number
        if is_number(base) and not isinstance(base, enum.Enum):
            raise MismatchError(f"a number has no {attr}")
        return (getattr(base, attr),)

    def _item(self, base: Any, index: Any) -> Any:
        layout, join = self.code.layout, self.code.join
        if isinstance(base, tuple):
            if not is_number(index):
                raise MismatchError("expected a number as a place of a tuple")
            if isinstance(index, int):
                return (base[index],)
            found = base[-1]
            for place, each in enumerate(base[:-1]):
                found = self.code.select(join(ast.Eq, index, place), each, found)
            return (found,)
        if not isinstance(base, Path) or (base.name not in layout.tables and base.name not in layout.arrays):
            raise MismatchError(f"{told(base)} has no places")
        flat = layout.arrays.get(base.name)
        of = flat.table if flat and not flat.line else ""
        if not (isinstance(index, Row) and index.table == of if of else is_number(index)):
            wanted = f"a record of {of}" if of else "a number"
            raise MismatchError(f"{base.name}: expected {wanted} as a place, got {told(index)}")
        if isinstance(index, int) and index < 0:
            raise MismatchError(f"{base.name}: expected a place that is not below 0")
        if not flat:
            return (Row(index, base.name),)
        return base.name, join(ast.Add, base.base, index.number if isinstance(index, Row) else index)

    # Conditions.

    def _either(self, test: Any, body: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
        """One of two values; what computes the other is not done."""

        def put(value: Callable[[], Any]) -> None:
            found = value()  # which may make other locals
            self.vars[VALUE] = found

        if isinstance(test, bool):
            return body() if test else orelse()
        self.branch(test, lambda: put(body), lambda: put(orelse))
        found = self.vars.pop(VALUE)
        if isinstance(found, MismatchError):
            raise found
        return found

    def _chain(self, e: ast.BoolOp) -> Any:
        """`and`, `or`: the operand that Python would return."""
        found = self.eval(e.values[0])
        for each in e.values[1:]:
            held, test = found, self.code.truth(found)
            bodies = (lambda each=each: self.eval(each)), (lambda held=held: held)
            found = self._either(test, *(bodies if isinstance(e.op, ast.And) else bodies[::-1]))
        return found

    def _compare(self, e: ast.Compare) -> Any:
        code, left, found = self.code, self.eval(e.left), True
        for op, right in zip(e.ops, map(self.eval, e.comparators), strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                if not isinstance(right, tuple):
                    raise MismatchError(f"expected a tuple, got {told(right)}")
                among: Any = False
                for each in right:
                    among = code.either(among, code.join(ast.Eq, left, each))
                holds = among if isinstance(op, ast.In) else code.negation(among)
            else:
                holds = code.join(type(op), left, right)
            found, left = code.both(found, holds), right
        return found

    # Calls.

    def _call(self, e: ast.Call) -> Any:
        whose: Any = None
        if isinstance(e.func, ast.Attribute):
            whose, name = self.eval(e.func.value), e.func.attr
            layout = self.code.layout
            kinds = layout.parts if isinstance(whose, Path) else layout.tables
            kind = kinds.get(whose.name if isinstance(whose, Path) else getattr(whose, "table", ""))
            function, given = getattr(kind or whose, name, None), [whose] if kind else []
        else:
            function, given = self.eval(e.func), []
        if any(isinstance(a, ast.Starred) for a in e.args) or not all(k.arg for k in e.keywords):
            raise MismatchError("arguments that cannot be lowered")
        if function is choice or function is seldom:
            return self.eval(e.args[-1])
        if isinstance(function, FunctionType):
            arguments = [*given, *map(self.eval, e.args)]
            return self.call(e, function, arguments, {str(k.arg): self.eval(k.value) for k in e.keywords})
        if function not in BUILTINS.values() or e.keywords or not e.args:
            raise MismatchError("a call of what is no rule of a text")
        first, *more = map(self.eval, e.args)
        if function in (int, bool) and not more:
            truth = self.code.truth(first)
            return truth if function is bool else self.code.select(truth, 1, 0) if is_condition(first) else first
        for each in more:
            first = self.code.join(function, first, each)
        return first

    def call(self, e: ast.AST, function: FunctionType, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Reads a rule where it is called; what it returns."""
        text = Text.of(function)
        if text is None or function.__qualname__ not in text.rules:
            raise self.fail(e, f"{function.__module__}.{function.__qualname__} stands in no text")
        if function in self.code.calls:
            raise self.fail(e, "a rule that calls itself")
        tree = text.rules[function.__qualname__]
        scalars = {name: value for name, value in self.vars.items() if name.startswith(".")}
        names = {**scalars, **self._bound(e, function, arguments, keywords)}
        frame = type(self)(self.code, function, names, self.on())
        with self.code.at_site(function, getattr(e, "lineno", 0)):
            frame.block(tree.body)
        self.vars |= {name: frame.vars[name] for name in scalars}
        returned = frame.vars.get(RESULT, NONE)
        if isinstance(returned, MismatchError):
            raise self.fail(e, returned)
        if frame.vars[LIVE] is not False and not isinstance(returned, Row):
            raise frame.fail(tree.body[-1], f"{function.__name__} returns {told(returned)} on some paths only; last is")
        return returned

    def _bound(self, e: ast.AST, function: FunctionType, arguments: list[Any], keywords: Any) -> dict[str, Any]:
        try:
            bound = inspect.signature(function).bind(*arguments, **keywords)
        except TypeError as error:
            raise self.fail(e, error) from None
        bound.apply_defaults()
        hints, layout = typing.get_type_hints(function), self.code.layout
        for name, value in bound.arguments.items():
            if value is None or value is NONE:
                kind: Any = hints.get(name)
                bound.arguments[name] = Row(0, layout.table_of(kind) if kind in layout.tables.values() else "")
            elif isinstance(value, Num | int | Row | Path | tuple) or callable(value):
                continue
            else:
                raise self.fail(e, f"{name}: {value!r} is no value of a text")
        return dict(bound.arguments)


BUILTINS: dict[str, Any] = {"min": min, "max": max, "int": int, "bool": bool}
