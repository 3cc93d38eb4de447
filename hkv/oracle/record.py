"""Random traffic on one engine, written down, or on two at once, compared."""

from __future__ import annotations

import dataclasses
from typing import Any

from hkv.errors import ConfigError, HKVError
from hkv.oracle.compare import Failure, Mismatch, compare
from hkv.oracle.engine import Engine, EngineFactory, apply
from hkv.oracle.oplog import Answer, Header, Operation
from hkv.testing.traffic import FEATURES, RandomChoices, draw_header, drive

VERSIONS = (1, 2)


@dataclasses.dataclass
class Recording:
    """What happened: a configuration, operations, and the answers to them so far.

    Attributes:
      header: the configuration.
      operations: the operations.
      answers: of the first engine, one an operation; of one that ended the run, where it gave any, the last.
    """

    header: Header
    operations: list[Operation] = dataclasses.field(default_factory=list)
    answers: list[Answer] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """Where two engines parted.

    Attributes:
      recording: everything up to there, with the answers of the engine that counts as right.
      mismatch: where the last answers differ.
    """

    recording: Recording
    mismatch: Mismatch


class _Parted(Exception):  # noqa: N818
    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__()
        self.mismatch = mismatch


def draw(feature: str, seed: int, version: int) -> tuple[Header, RandomChoices]:
    """The configuration of a seed, and the choices that its traffic goes on with.

    Raises:
      ConfigError: unknown feature or version.
    """
    if feature not in FEATURES:
        raise ConfigError("feature", feature, f"one of {', '.join(FEATURES)}")
    if version not in VERSIONS:
        raise ConfigError("version", version, f"one of {VERSIONS}")
    choices = RandomChoices(seed)
    return draw_header(choices, feature, version), choices


def record(factory: EngineFactory, feature: str, seed: int, version: int, steps: int) -> Recording:
    """Drives an engine through the traffic of a seed.

    Raises:
      HKVError: the engine cannot represent the configuration, or refused an operation that is legal.
    """
    header, choices = draw(feature, seed, version)
    engine = factory(header)
    recording = Recording(header)

    def perform(operation: Operation) -> Answer:
        answer = apply(engine, operation)
        recording.operations.append(operation)
        recording.answers.append(answer)
        return answer

    drive(header, choices, perform, steps)
    return recording


def differ(
    tested: EngineFactory, right: EngineFactory, feature: str, seed: int, version: int, steps: int
) -> tuple[Recording, Disagreement | None]:
    """Drives two engines through the traffic of a seed and compares every answer.

    Args:
      tested: the engine in doubt.
      right: the engine whose answers count.
      feature: what the traffic is about.
      seed: of the configuration and the traffic.
      version: of the log format.
      steps: scheduling steps.

    Returns:
      What happened, and where they parted, or None if they agreed to the end.
    """
    header, choices = draw(feature, seed, version)
    recording = Recording(header)
    engines = _make(tested, right, header)
    if isinstance(engines, Mismatch):
        return recording, Disagreement(recording, engines)

    def perform(operation: Operation) -> Answer:
        got, want = (_answer(engine, operation) for engine in engines)
        recording.operations.append(operation)
        recording.answers.append(None if isinstance(want, Failure) else want)
        if mismatch := compare(want, got, header.oplog):
            raise _Parted(mismatch)
        if isinstance(want, Failure):
            raise _Parted(Mismatch("error", want.message, "the same"))
        return want

    try:
        drive(header, choices, perform, steps)
    except _Parted as parted:
        return recording, Disagreement(recording, parted.mismatch)
    return recording, None


def _make(tested: EngineFactory, right: EngineFactory, header: Header) -> tuple[Engine, Engine] | Mismatch:
    made: list[Any] = []
    for factory in (tested, right):
        try:
            made.append(factory(header))
        except HKVError as error:
            made.append(Failure(str(error)))
    if any(isinstance(engine, Failure) for engine in made):
        got, want = ((engine.message if isinstance(engine, Failure) else "accepted") for engine in made)
        return Mismatch("header", want, got)
    return made[0], made[1]


def _answer(engine: Engine, operation: Operation) -> Answer | Failure:
    try:
        return apply(engine, operation)
    except HKVError as error:
        return Failure(str(error))
