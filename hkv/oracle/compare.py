"""Comparison of two answers to one operation: the first difference and its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hkv.oracle.engine import Failure


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The first place where two answers differ.

    Attributes:
      field: the path to it within the answer, e.g. `blocks[1]`.
      want: value of the one there; `got`: value of the other.
    """

    field: str
    want: Any
    got: Any


def first_difference(want: Any, got: Any, path: str = "") -> Mismatch | None:
    """The first place at which two values differ, structs, mappings and lists entered; None where they are equal."""
    return _first(path, msgspec.to_builtins(want), msgspec.to_builtins(got))


def compare(want: Any, got: Any, answers: Callable[[Any, Any], Mismatch | None] = first_difference) -> Mismatch | None:
    """The first difference between two answers, or None when they agree.

    Args:
      want: the answer to be met.
      got: the other one; either may be a Failure, and two of them agree.
      answers: finds the first difference between two that are none.
    """
    if isinstance(want, Failure) or isinstance(got, Failure):
        if isinstance(want, Failure) and isinstance(got, Failure):
            return None
        return Mismatch("error", _shown(want), _shown(got))
    return answers(want, got)


def _shown(answer: Any) -> Any:
    return answer.message if isinstance(answer, Failure) else "no error"


def _first(path: str, want: Any, got: Any) -> Mismatch | None:
    if isinstance(want, dict) and isinstance(got, dict):
        for key in [*want, *(key for key in got if key not in want)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in want or key not in got:
                return Mismatch(inner, want.get(key, "absent"), got.get(key, "absent"))
            if mismatch := _first(inner, want[key], got[key]):
                return mismatch
        return None
    if _is_list(want) and _is_list(got):
        if len(want) == len(got) and any(_is_list(item) or isinstance(item, dict) for item in want):
            for index, pair in enumerate(zip(want, got, strict=True)):
                if mismatch := _first(f"{path}[{index}]", *pair):
                    return mismatch
            return None
        want, got = list(want), list(got)
    return None if want == got else Mismatch(path or "answer", want, got)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
