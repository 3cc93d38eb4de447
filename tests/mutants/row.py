"""One planted defect: what is edited, and which test must fail over it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from hkv.testing.mutants.patch import Patch


@dataclasses.dataclass(frozen=True)
class Planted:
    """A defect of one edit.

    Attributes:
      name: in a few words joined by hyphens; unique.
      target: which part of the code is judged: a key of `tests.mutants.ROWS`; set there.
      function: `module:qualified name` of the function that is edited.
      text: text that stands in its source exactly once.
      defect: what stands there instead.
      judge: `module:function` of what must fail: a test, or a property without arguments of its own.
      arguments: what the judge is called with.
    """

    name: str
    function: str
    text: str
    defect: str
    judge: str
    arguments: tuple[Any, ...] = ()
    target: str = ""

    @property
    def patch(self) -> Patch:
        """The edit."""
        return Patch(self.function, self.text, self.defect)

    @property
    def property_name(self) -> str:
        """The judge and its arguments in a few words."""
        module, name = self.judge.split(":")
        shown = ", ".join(str(argument) for argument in self.arguments)
        return f"{module.removeprefix('tests.').replace('.', '/')}: {name.removeprefix('test_')}" + f"[{shown}]" * bool(
            shown
        )

    def property(self) -> Callable[[], object]:
        """What must fail while the defect is planted, and passes without it.

        Raises:
          AttributeError, ImportError: there is no such function.
        """
        module, name = self.judge.split(":")
        return functools.partial(getattr(importlib.import_module(module), name), *self.arguments)
