"""A text's source, read when its module is imported: the rules by name, and the named clauses in them."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterator
from types import FunctionType

from reference.language.clauses import Clause


class Text:
    """The source of a module of rules, which says `TEXT = Text(__name__)`.

    It is read at import, so that what is compiled later is what runs, whatever became of the file.

    Attributes:
      module: its name. file: where its source is. source: the source.
    """

    def __init__(self, module: str, source: str | None = None) -> None:
        self.module, self.file = module, sys.modules[module].__file__ or module
        self.source = pathlib.Path(self.file).read_text(encoding="utf-8") if source is None else source

    @staticmethod
    def of(rule: FunctionType) -> Text | None:
        """The text in which a rule stands; None for a function of another module."""
        found = rule.__globals__.get("TEXT")
        return found if isinstance(found, Text) else None

    @functools.cached_property
    def rules(self) -> dict[str, ast.FunctionDef]:
        """Functions by qualified name."""
        return dict(_functions(ast.parse(self.source), ""))

    @functools.cached_property
    def clauses(self) -> dict[str, Clause]:
        """Named clauses by name, in the order of the text."""
        found: dict[str, Clause] = {}
        for rule, tree in self.rules.items():
            for node in ast.walk(tree):
                match node:
                    case ast.Call(func=ast.Name(id="clause"), args=[ast.Constant(value=str(name)), *more]):
                        if name in found:
                            raise ValueError(f"{self.file}:{node.lineno}: a clause is named {name!r} already")
                        symbol, meaning = [*(str(ast.literal_eval(each)) for each in more), "", ""][:2]
                        found[name] = Clause(name, symbol, meaning or _first(tree), rule, self.file, node.lineno)
        return found


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _first(rule: ast.FunctionDef) -> str:
    """The first thing that a rule's docstring says."""
    words = " ".join((ast.get_docstring(rule) or "").split())
    said = re.split(r"[.;:] |\.$", words)[0]
    return said[:1].lower() + said[1:]
