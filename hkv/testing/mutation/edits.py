"""One-token edits of Python source: every one of a module, a class or a function, in order of the text.

An edit replaces a stretch of the text, so that what is reported is what stands in the file: a comparison by its
neighbour (`<` by `<=`), a whole number or a bound by one more or less, an operator by its opposite, `and` by `or`,
`min` by `max`; a `not`, a summand, a call around a value, a call or an augmented assignment by nothing; two arguments
of one form by each other; a condition by its negation. Left alone is what no test is expected to notice: annotations,
decorators, messages of errors, assertions, f-strings, lines of a log, and lines marked `# pragma: no mutate`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from hkv.errors import ConfigError

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""Text of each comparison, and of the one that takes its place."""

OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
"""Text of each operator, and of the one that takes its place."""

_OPPOSITES = ("min max", "minimum maximum", "any all", "argmin argmax", "logical_and logical_or", "fmin fmax")
OPPOSITES = {one: other for pair in map(str.split, _OPPOSITES) for one, other in (pair, pair[::-1])}
"""Functions and methods that take each other's place."""

_COMMUTATIVE = """
min max minimum maximum logical_and logical_or logical_xor add multiply equal not_equal gcd lcm isclose array_equal
isinstance issubclass getattr hasattr print cast
"""
COMMUTATIVE = frozenset(_COMMUTATIVE.split())
"""Functions whose arguments are not swapped: it changes nothing, or no call of them would come through."""

_CONVERSIONS = """
len int float str bool bytes list tuple set dict frozenset iter next range enumerate zip isinstance type super repr id
hash print cast asarray array int32 uint32 float32 uint8 astype item tolist block_until_ready items keys values hex
encode decode
"""
CONVERSIONS = frozenset(_CONVERSIONS.split())
"""Functions whose value is not replaced by their argument: mostly the same thing in another form."""

LOGGERS = frozenset({"logger", "logging", "log", "warnings", "print", "click", "console"})
"""Names that begin a statement which only tells somebody something."""

UNTOUCHED = "# pragma: no mutate"
"""Comment on a line whose edits nobody wants to hear of."""

_ALIAS: tuple[type[ast.AST], ...] = (ast.TypeAlias,) if sys.version_info >= (3, 12) else ()
_SKIPPED = (*_ALIAS, ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.pattern)
_UNREAD = frozenset({"annotation", "returns", "decorator_list", "type_params", "bases"})
_PRIMARY = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


@dataclasses.dataclass(frozen=True)
class Edit:
    """A stretch of a source text and what replaces it.

    Attributes:
      start, end: the stretch, in bytes of the text as UTF-8.
      line, column: of its first character, counted from 1, the column in bytes.
      old, new: the text there, and the text after the edit.
      kind: kind of the edit.
      function: qualified name of the innermost class or function around it; "" at the top of the module.
      statement: line of the innermost statement around it, which has to run for the edit to matter.
    """

    start: int
    end: int
    line: int
    column: int
    old: str
    new: str
    kind: str
    function: str
    statement: int

    @property
    def key(self) -> str:
        """Names the edit among all of one text."""
        return f"{self.line}:{self.column}:{self.old}:{self.new}"

    @property
    def described(self) -> str:
        """The edit in a line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        if not old:
            return f"`{new}` inserted"
        return f"`{old}` dropped" if not new else f"`{old}` -> `{new}`"

    def applied(self, source: str) -> str:
        """The source text with the edit made."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def edits_of(source: str, scope: str = "") -> list[Edit]:
    """Every edit of a source text, or of the class or function `scope` in it, that leaves it valid Python, in its
    order."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError("module", f"line {error.lineno}", f"Python: {error.msg}") from None
    finder = _Finder(source)
    finder.visit(tree, _Place((), 1, (0, 0)))
    if scope and scope not in finder.names:
        raise ConfigError("module", scope, "the qualified name of a class or function that the module defines")
    inside = (edit for edit in finder.found.values() if not scope or f"{edit.function}.".startswith(f"{scope}."))
    return sorted(inside, key=lambda edit: (edit.start, edit.end, edit.new))


class _Place(NamedTuple):
    path: tuple[str, ...]
    statement: int
    span: tuple[int, int]  # of the statement


class _Finder:
    """A walk over a syntax tree that collects edits; those that two rules make are one."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0, *(match.end() for match in re.finditer(b"\n", self._data))]
        self._lines = source.split("\n")
        self.found: dict[tuple[int, int, str], Edit] = {}
        self.names: set[str] = set()
        self._whole: set[int] = set()  # calls that are statements

    def visit(self, node: ast.AST, place: _Place) -> None:
        """Collects the edits of a node and of all below it."""
        if (
            isinstance(node, _SKIPPED)
            or _tells(node)
            or _asserts(node)
            or UNTOUCHED in self._lines[getattr(node, "lineno", 1) - 1]
        ):
            return
        if isinstance(node, ast.stmt):
            place = place._replace(statement=node.lineno, span=self._span(node))
        for start, end, new, kind in self._edits(node):
            self._add(start, end, new, kind, place)
        inner = place
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = place._replace(path=(*place.path, node.name))
            self.names.add(".".join(inner.path))
        for field, value in ast.iter_fields(node):
            if field in _UNREAD or (field == "body" and _for_checkers(node)):
                continue
            below = inner if field in ("body", "args") else place
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    self.visit(child, below)

    def _add(self, start: int, end: int, new: str, kind: str, place: _Place) -> None:
        line = self._data.count(b"\n", 0, start) + 1
        old = self._data[start:end].decode()
        if old != new and self._valid(start, end, new, place.span):
            column = start - self._starts[line - 1] + 1
            edit = Edit(start, end, line, column, old, new, kind, ".".join(place.path), place.statement)
            self.found.setdefault((start, end, new), edit)

    def _valid(self, start: int, end: int, new: str, span: tuple[int, int]) -> bool:
        """True if the statement is Python with the edit in it; parsing the whole text each time would take too long."""
        first, last = span
        indent = first - (self._data.rfind(b"\n", 0, first) + 1)
        text = self._data[first:start] + new.encode() + self._data[end:last]
        text = text.removeprefix(b"el") if text.startswith(b"elif") else text
        try:
            ast.parse((b"if 1:\n" if indent else b"") + b" " * indent + text)
        except SyntaxError:
            return False
        return True

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """First and last byte of an expression or statement, parentheses around it left out."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _between(self, left: ast.AST, right: ast.AST, operator: str) -> tuple[int, int]:
        """First and last byte of an operator of one or two words between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.search(r"\s+".join(map(re.escape, operator.split())).encode(), self._data[start:end])
        assert found is not None
        return start + found.start(), start + found.end()

    def _edits(self, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        match node:
            case ast.Compare():
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    old, new = COMPARISONS[type(operator)]
                    yield *self._between(left, right, old), new, "comparison"
            case ast.BoolOp():
                old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield *self._between(left, right, old), new, "and/or"
            case ast.BinOp() if type(node.op) in OPERATORS:
                old, new = OPERATORS[type(node.op)]
                place = self._between(node.left, node.right, old)
                yield *place, new, "operator"
                if old in "+-":
                    yield place[0], self._span(node)[1], "", "summand"
            case ast.AugAssign():
                yield *self._span(node), "pass", "dropped assignment"
                if type(node.op) in OPERATORS:
                    old, new = OPERATORS[type(node.op)]
                    yield *self._between(node.target, node.value, f"{old}="), f"{new}=", "operator"
            case ast.UnaryOp() if not isinstance(node.op, ast.UAdd):
                start, word = self._span(node)[0], b"not" if isinstance(node.op, ast.Not) else b"-"
                blank = re.compile(rb"\s*").match(self._data, start + len(word))
                assert blank is not None
                yield start, blank.end(), "", "not" if len(word) > 1 else "sign"
            case ast.Constant() if isinstance(node.value, bool):
                yield *self._span(node), str(not node.value), "constant"
            case ast.Constant() if isinstance(node.value, int):
                yield *self._span(node), str(node.value + 1), "constant"
                if node.value > 0:
                    yield *self._span(node), str(node.value - 1), "constant"
            case ast.Break() | ast.Continue():
                yield *self._span(node), "continue" if isinstance(node, ast.Break) else "break", "loop"
            case ast.Expr(value=ast.Call() | ast.Await()):
                self._whole.add(id(node.value))
                yield *self._span(node), "pass", "dropped call"
            case ast.Call():
                yield from self._calls(node)
            case ast.Slice():
                yield from self._bound(node.lower, "+")
                yield from self._bound(node.upper, "-")
        if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, _PRIMARY):
            start, _ = self._span(node.test)
            if not _for_checkers(node):
                yield start, start, "not ", "not"

    def _calls(self, call: ast.Call) -> Iterator[tuple[int, int, str, str]]:
        name, (start, end) = _name(call.func), self._span(call)
        if name in OPPOSITES:
            at = self._span(call.func)[1] - len(name.encode())
            yield at, at + len(name.encode()), OPPOSITES[name], "min/max"
        plain = name not in CONVERSIONS and not name[:1].isupper() and not call.keywords and id(call) not in self._whole
        if plain and len(call.args) == 1 and not isinstance(call.args[0], ast.Starred | ast.GeneratorExp):
            value = self._text(call.args[0])
            simple = isinstance(call.args[0], (ast.Constant, *_PRIMARY))
            yield start, end, value if simple else f"({value})", "dropped call"
        elif plain and not call.args and isinstance(call.func, ast.Attribute):
            yield start, end, self._text(call.func.value), "dropped call"
        if name == "range" and call.args:
            yield from self._bound(call.args[-1 if len(call.args) < 3 else 1], "-")
        for one, other in zip(call.args, call.args[1:], strict=False):
            if name not in COMMUTATIVE and type(one) is type(other) and not isinstance(one, ast.Starred):
                (first, middle), (last, behind) = self._span(one), self._span(other)
                between = self._data[middle:last].decode()
                yield first, behind, f"{self._text(other)}{between}{self._text(one)}", "swapped arguments"

    def _bound(self, bound: ast.expr | None, sign: str) -> Iterator[tuple[int, int, str, str]]:
        if isinstance(bound, (ast.BinOp, *_PRIMARY)):
            end = self._span(bound)[1]
            yield end, end, f" {sign} 1", "bound"


def _name(function: ast.expr) -> str:
    """Last name of what is called; "" for what has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _tells(node: ast.AST) -> bool:
    """True for a statement that writes to a log or a terminal."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    function: ast.expr = node.value.func
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in LOGGERS


def _asserts(node: ast.AST) -> bool:
    """True for `strict=True` of `zip`, which is an assertion."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _for_checkers(node: ast.AST) -> bool:
    """True for `if TYPE_CHECKING:`, whose body does not run."""
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"
