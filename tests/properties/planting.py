"""Planting one defect at a time, to see which property finds it."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType


@contextlib.contextmanager
def planted(function: FunctionType, text: str, defect: str) -> Iterator[None]:
    """Replace `text`, which must stand in the function's source exactly once, by `defect`, until the block ends.

    The function object stays the same and only runs other code, so every module, class and record that holds it is
    affected.
    """
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, f"{text!r} stands {source.count(text)} times in {function.__qualname__}"
    original = function.__code__
    function.__code__ = _code(source.replace(text, defect), function)
    try:
        yield
    finally:
        function.__code__ = original


def _code(source: str, function: FunctionType):
    free = function.__code__.co_freevars
    cells = "".join(f"    {name} = None\n" for name in free)
    wrapped = f"def outer():\n{cells}{textwrap.indent(source, '    ')}\n    return {function.__name__}\n"
    space: dict[str, object] = {}
    exec(compile(f"from __future__ import annotations\n{wrapped}", inspect.getfile(function), "exec"), space)
    made = space["outer"]()  # type: ignore[operator]
    assert made.__code__.co_freevars == free
    return made.__code__
