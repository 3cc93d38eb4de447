"""Answers of engines: an error in place of one, the first difference between two, and names of blocks in them."""

from __future__ import annotations

import copy
import dataclasses
import traceback
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from hkv.contract.log import answer_type
from hkv.errors import EngineFailure, EngineTimeoutError, HKVError
from hkv.foreign import own_warnings

EngineFactory = Callable[[Any], Any]
"""Makes an engine, empty, of a header's configuration; see `Dialect.perform` for what an engine offers. It raises
`hkv.errors.ConfigError` for a configuration that it cannot represent."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Error that an engine raised instead of an answer.

    Attributes:
      timed_out: True if the engine was silent for longer than it may be.
      named: True if a defect that was asked for by name ended the engine.
    """

    message: str
    timed_out: bool = False
    named: bool = False


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


def taken(answer: Any) -> Any:
    """An answer as it is when it is given: an engine may hand out lists of its own, which go on changing."""
    # The types of logs first: `copy.deepcopy` takes up to three times as long, and there are many answers.
    if isinstance(answer, list):
        return answer.copy() if not answer or type(answer[0]) is int else [taken(each) for each in answer]
    if isinstance(answer, dict):
        return {name: taken(each) for name, each in answer.items()}
    if isinstance(answer, msgspec.Struct):
        fields = ((name, getattr(answer, name)) for name in answer.__struct_fields__)
        return type(answer)(**{name: value if type(value) in _PLAIN else taken(value) for name, value in fields})
    return answer if type(answer) in _PLAIN else copy.deepcopy(answer)


_PLAIN = (int, bool, str, bytes, float, type(None))


def attempt_with(perform: Callable[[Any, Any], Any], engine: Any, operation: Any) -> Any:
    """`perform`'s answer; an error, or an answer of another type than the operation declares, becomes a Failure."""
    try:
        with own_warnings():
            answer = perform(engine, operation)
    except Exception as error:
        return failure_of(error)
    declared = answer_type(type(operation))
    wanted = typing.get_origin(declared) or declared
    if (answer is not None) if wanted is None else not isinstance(answer, wanted):
        return Failure(f"answered {answer!r}, where {wanted.__name__ if wanted else None} was to come")
    return answer


def failure_of(error: Exception) -> Failure:
    """Failure for an error that an engine raised: an error of HKV's in its words, any other with its place."""
    if isinstance(error, HKVError):
        return Failure(str(error), isinstance(error, EngineTimeoutError), isinstance(error, EngineFailure))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {_installed(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return Failure(f"{type(error).__name__}: {error}{place}")


def _installed(path: str) -> str:
    """A file of an installed package by its place in the package, which is the same on every machine; others whole."""
    return path.rpartition("site-packages/")[2]


@runtime_checkable
class BatchEngine(Protocol):
    """An engine that would rather have many operations at once than one at a time."""

    def run(self, operations: Sequence[Any]) -> list[Any]:
        """Performs operations in order and returns the answer to each."""
        ...


def first_difference(want: Any, got: Any, path: str = "") -> Mismatch | None:
    """The first place at which two values differ, structs, mappings and lists entered; None where they are equal."""
    want, got = msgspec.to_builtins(want), msgspec.to_builtins(got)
    return None if want == got else _first(path, want, got)  # nearly always: no place has to be looked for


def compare(want: Any, got: Any, answers: Callable[[Any, Any], Mismatch | None] = first_difference) -> Mismatch | None:
    """The first difference between two answers, or None when they agree, as two Failures do; `answers` compares two
    that are none.
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


# Comparison of two engines' block ids: exactly, or, if the dialect offers it, up to renaming of blocks.

States = Callable[[Any], tuple[Any, Any]]
"""Performs an operation that changes nothing on both engines, and answers what the right one and the tested one say."""


class SameNames:
    """Blocks are called what they are called: nothing is renamed. The base of every other way."""

    def operation(self, operation: Any, states: States) -> Any:
        """The operation as the tested engine has to hear it."""
        return operation

    def answer(self, want: Any, got: Any) -> Any:
        """The tested engine's answer in the names of the right one's."""
        return got

    def learn(self, operation: Any, states: States) -> None:
        """Takes note of what no answer tells, after an operation."""
