"""Patches: one piece of a function's source text replaced by another, in memory, for as long as a block runs."""

from __future__ import annotations
import __future__

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from hkv.errors import OperationError


@dataclasses.dataclass(frozen=True)
class Patch:
    """One edit of one function.

    Attributes:
      target: `module:qualified name` of a function, method, property or class method; of a jitted or cached function,
        its own code is edited, which programs that were compiled before do not notice.
      old: text that must stand in its source exactly once.
      new: text to put in its place.
    """

    target: str
    old: str
    new: str

    def function(self) -> FunctionType:
        """The function object that runs.

        Raises:
          OperationError: there is no such function.
        """
        module, _, path = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = inspect.getattr_static(found, name)
        except (ImportError, AttributeError):
            raise OperationError("target", self.target, "module:name of something that exists") from None
        if isinstance(found, property):
            found = found.fget
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if isinstance(found, functools.cached_property):
            found = found.func
        found = inspect.unwrap(found)  # jitted, or cached: its source, too, is that of the innermost
        if not isinstance(found, FunctionType):
            raise OperationError("target", self.target, "a plain function, method, property or class method")
        return found

    def code(self) -> CodeType:
        """The function's code after the edit.

        Raises:
          OperationError: the old text does not stand there exactly once, is the new one, or the result is no Python.
        """
        function = self.function()
        source = textwrap.dedent(inspect.getsource(function))
        times = source.count(self.old)
        if times != 1:
            raise OperationError("old", self.old, f"text that stands in {self.target} once, not {times} times")
        if self.old == self.new:
            raise OperationError("new", self.new, "text other than the old one")
        try:
            return compiled(source.replace(self.old, self.new), function)
        except SyntaxError as error:
            raise OperationError("new", self.new, f"Python in {self.target}: {error.msg}") from None


def compiled(source: str, function: FunctionType) -> CodeType:
    """The code of a function's source, closing over the same names as `function`, so that it can take its place.

    Raises:
      SyntaxError: it is no Python.
      OperationError: it closes over other names.
    """
    tree = ast.parse(source)
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    free = function.__code__.co_freevars
    if free:
        cells = [ast.parse(f"{name} = None").body[0] for name in free]
        back = ast.parse(f"return {node.name}").body[0]
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        outer = ast.parse("def outer(): pass").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.args, outer.body = empty, [*cells, node, back]
        tree.body = [outer]
    ast.fix_missing_locations(tree)
    flags = __future__.annotations.compiler_flag
    module = compile(tree, inspect.getfile(function), "exec", flags=flags, dont_inherit=True)
    code = _inner(module, node.name)
    if code.co_freevars != free:
        raise OperationError("new", code.co_freevars, f"code that closes over {free}")
    return code


def _inner(code: CodeType, name: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            if constant.co_name == "outer":
                return _inner(constant, name)
    raise SyntaxError(f"no function {name}")


@contextlib.contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Lets functions run their edited code until the block ends; nothing is written to disk.

    The function objects stay the same, so every class, module and record that holds one is affected.

    Args:
      patches: edits of different functions, or of the same one in several places.

    Raises:
      OperationError: a patch does not fit; then nothing was changed.
    """
    by_function: dict[str, list[Patch]] = {}
    for patch in patches:
        by_function.setdefault(patch.target, []).append(patch)
    edited = []
    for group in by_function.values():
        function = group[0].function()
        source = textwrap.dedent(inspect.getsource(function))
        for patch in group:
            patch.code()
            source = source.replace(patch.old, patch.new)
        edited.append((function, function.__code__, compiled(source, function)))
    try:
        for function, _, code in edited:
            function.__code__ = code
        yield
    finally:
        for function, code, _ in edited:
            function.__code__ = code
