"""Two replays held against each other: the first place at which they differ."""

from __future__ import annotations

import dataclasses

from hkv.replay.record import Recorder


class Difference(Exception):  # noqa: N818 - the answer of a check, not an error of the input
    """Two engines answered differently.

    Attributes:
      number: operations performed up to and including this one.
      operation: its name.
      request: the request concerned, or "".
      field: field that differs.
      answers: per engine, its name and what it answered.
    """

    def __init__(self, number: int, operation: str, request: str, field: str, answers: dict[str, object]) -> None:
        self.number = number
        self.operation = operation
        self.request = request
        self.field = field
        self.answers = answers
        told = "; ".join(f"{name}: {_shorten(answer)}" for name, answer in answers.items())
        of = f" of request {request}" if request else ""
        super().__init__(f"operation {number}, {operation}{of}: {field} differs: {told}")


def compare_records(mine: Recorder, other: Recorder, names: tuple[str, str]) -> None:
    """Compares every request's fate, what groups lacked for it among that, and every step.

    Raises:
      Difference: names the first one.
    """
    for index in sorted(mine.requests.keys() | other.requests.keys()):
        compare(f"request {index}", mine.requests.get(index), other.requests.get(index), names)
    for field in dataclasses.fields(mine.steps):
        ours, theirs = getattr(mine.steps, field.name), getattr(other.steps, field.name)
        if ours != theirs:
            step = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ours), len(theirs)) if step is None else step
            compare(f"{field.name} of the {at + 1}th step with work", ours[at : at + 1], theirs[at : at + 1], names)


def compare(field: str, mine: object, other: object, names: tuple[str, str]) -> None:
    """Compares two answers.

    Raises:
      Difference: they differ.
    """
    if mine != other:
        raise Difference(0, "replay", "", field, dict(zip(names, (mine, other), strict=True)))


def _shorten(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
