"""Checking, recording and explaining logs: what `hkv check`, `hkv record` and `hkv explain` find, as typed values."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from hkv.columns import Columns, columns
from hkv.contract import registry
from hkv.contract.answer import EngineFactory, taken
from hkv.contract.bugs import bugs_of_part
from hkv.contract.dialect import Dialect
from hkv.contract.explanation import Event, Explanation, find_request
from hkv.contract.log import Log, describe
from hkv.errors import ConfigError, FileError, UnsupportedConfigError
from hkv.limits import counted
from hkv.oracle.check import Difference, check_log, judge_log, known_defects
from hkv.oracle.engine import answers, make_engine
from hkv.oracle.engines import REFERENCE, engine_factory
from hkv.oracle.log_file import find_logs, log_bytes, parse_log, read_log, write_atomically
from hkv.oracle.record import Only, Recording
from hkv.oracle.record import record as record_traffic

if TYPE_CHECKING:
    from hkv.oracle.side import Drawn

EngineLike: TypeAlias = str | EngineFactory
"""An engine as commands name it (`numpy`, `cmd:./my-engine`, `my_engine.py:Engine`), or its class, taking a header."""

Path: TypeAlias = str | os.PathLike[str]


RECORDED = 2
"""Version of the log format that is recorded by default, or the first later one that has the kinds asked for."""


def named_engine(engine: EngineLike, timeout: float | None = None) -> tuple[str, EngineFactory]:
    """An engine's name, for reports, and its factory."""
    if isinstance(engine, str):
        return engine, engine_factory(engine, timeout)
    return str(getattr(engine, "__qualname__", engine)), engine


@dataclasses.dataclass(frozen=True)
class CheckedLog:
    """A log that an engine was held against.

    Attributes:
      path: the log.
      dialect: as its header names it.
      operations: number of its operations.
      difference: the first one, or None where they agree.
      exercised: number of times that it exercised each rule; empty unless coverage was asked for.
      ended: reason why it ends before the recorded cache did; "" where it does not.
      asked: names of the invariants that it was judged by; empty where an engine was.
      known_defects: names of upstream defects of its engine with which it agrees and without which it differs.
      warnings: sentences on what its cache is about to run into.
    """

    path: str
    dialect: str
    operations: int
    difference: Difference | None
    exercised: Mapping[str, int]
    ended: str = ""
    asked: frozenset[str] = frozenset()
    known_defects: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> tuple[str, str]:
        """One of `VERDICTS`, and what there is to say of it."""
        if self.difference is not None:
            return "differs", self.difference.describe()
        if self.known_defects:
            return "known defect", f"agrees under {', '.join(self.known_defects)}"
        if not self.operations:
            return "empty", "a log without operations"
        return ("ends early", self.ended) if self.ended else ("agrees", "")


VERDICTS = ("agrees", "differs", "known defect", "ends early", "empty", "not implemented", "unusable")
"""Verdicts on logs. One that ends early agrees up to there; one of a known defect does once that is reproduced; an
empty one says nothing."""


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Result of checking logs.

    Attributes:
      engine: name of the engine.
      checked: the logs that it implements, in order.
      not_implemented: reasons why it does not implement the others, by path.
      rules: rules that logs may exercise, with their meanings; empty unless coverage was asked for.
      unusable: errors of the files that are no logs, by path, where these do not end the check.
      not_compared: what the engine says it lacks, with its meaning.
    """

    engine: str
    checked: tuple[CheckedLog, ...]
    not_implemented: Mapping[str, str]
    rules: Mapping[str, str]
    unusable: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    not_compared: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def verdicts(self) -> dict[str, tuple[str, str]]:
        """By path, one of `VERDICTS`, and what there is to say of it."""
        found = {log.path: log.verdict for log in self.checked}
        found |= {path: ("not implemented", reason) for path, reason in self.not_implemented.items()}
        return found | {path: ("unusable", reason) for path, reason in self.unusable.items()}

    @property
    def agrees(self) -> bool:
        """True if no log differs."""
        return not self.differences

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The first difference of each log that has one."""
        return tuple(log.difference for log in self.checked if log.difference is not None)

    @property
    def operations(self) -> int:
        """Operations of all logs checked."""
        return sum(log.operations for log in self.checked)

    @property
    def logs(self) -> Columns:
        """One entry a log checked: `path`, `operations`, `agrees`, and the `line` of its difference, 0 for none."""
        return columns(
            self.checked,
            {
                "path": (lambda log: log.path, str),
                "operations": (lambda log: log.operations, int),
                "agrees": (lambda log: log.difference is None, bool),
                "line": (lambda log: 0 if log.difference is None else log.difference.line, int),
            },
        )

    @property
    def coverage(self) -> Columns:
        """One entry a rule: `rule`, `meaning`, in how many `logs` it was exercised, and how many `times` in all."""
        times = [(rule, [log.exercised[rule] for log in self.checked if rule in log.exercised]) for rule in self.rules]
        return columns(
            times,
            {
                "rule": (lambda row: row[0], str),
                "meaning": (lambda row: self.rules[row[0]], str),
                "logs": (lambda row: len(row[1]), int),
                "times": (lambda row: sum(row[1]), int),
            },
        )


class Check:
    """Holds an engine against one log after the other; `result` may be asked at any time.

    Without an engine, logs are judged by invariants alone. `drawn` keeps what a page shows. Arguments as of `check`.
    """

    drawn: Drawn | None = None

    def __init__(self, engine: EngineLike | None, bugs: Sequence[str], coverage: bool, timeout: float | None) -> None:
        self._name, self._factory = ("", None) if engine is None else named_engine(engine, timeout)
        self._not_compared: dict[str, str] = {}
        self._bugs, self._coverage = tuple(bugs), coverage
        self._checked: list[CheckedLog] = []
        self._unsupported: dict[str, str] = {}
        self._unusable: dict[str, str] = {}
        self._rules: dict[str, str] = {}

    def log(self, path: str) -> None:
        """Checks one log."""
        self.read(read_log(path))

    def read(self, log: Log) -> None:
        """Checks one log that was read."""
        path = log.path
        dialect = registry.dialect_of(log.header.dialect)
        bugs_of_part(self._bugs, "manager", dialect.title, dialect.bugs)
        asked = frozenset[str]()
        try:
            if self._factory is None:
                difference, asked = judge_log(log)
            else:
                performing = answers if self.drawn is None else self.drawn.performing(log)
                difference = check_log(log, self._made(dialect), self._bugs, performing)
        except UnsupportedConfigError as error:
            self._unsupported[path] = str(error.value)
            return
        known: tuple[str, ...] = ()
        if difference is not None and self._factory is not None and dialect.bugs:
            known = known_defects(log, self._factory, difference, self._bugs)
        exercised = dialect.exercised(log) if self._coverage else {}
        if self._coverage:
            self._rules |= dialect.coverage
        ended = dialect.ended(log)
        difference = None if known else difference
        self._checked.append(
            CheckedLog(
                *(path, log.header.dialect, len(log.operations), difference, exercised, ended, asked, known),
                warnings=tuple(dialect.warnings(log)),
            )
        )
        if self.drawn is not None:
            self.drawn.keep(log, difference, known)

    def _made(self, dialect: Dialect) -> EngineFactory:
        """The factory, of whose engines it is noted what they lack."""

        def make(header: Any) -> Any:
            assert self._factory is not None
            engine = self._factory(header)
            lacks = dialect.missing_capabilities(engine)
            self._not_compared |= {name: each for name, each in dialect.capabilities.items() if name in lacks}
            return engine

        return make

    def log_or_note(self, path: str) -> None:
        """Checks one log; what is wrong with the file is noted."""
        try:
            self.log(path)
        except FileError as error:
            self._unusable[path] = str(error)

    def result(self) -> CheckResult:
        """Result so far."""
        checked, rules = tuple(self._checked), dict(self._rules)
        unsupported, unusable = dict(self._unsupported), dict(self._unusable)
        return CheckResult(self._name, checked, unsupported, rules, unusable, dict(self._not_compared))

    def finished(self) -> CheckResult:
        """Result of all checks; ConfigError if the engine implements none of the logs."""
        if self._unsupported and not self._checked and not self._unusable:
            reason = next(iter(self._unsupported.values()))
            raise ConfigError("engine", self._name, f"one that implements one of these logs ({reason})")
        return self.result()


def filled(path: str, engine: EngineLike, timeout: float | None = None) -> Log:
    """A log in which an engine's answers stand where it has none."""
    factory = named_engine(engine, timeout)[1]

    def answering(header: Any) -> Callable[[Any], Any]:
        dialect, engine = registry.dialect_of(header.dialect), make_engine(factory, header)
        return lambda operation: taken(dialect.perform(engine, operation))

    return read_log(path, answering)


def check(
    logs: Path | Iterable[Path],
    engine: EngineLike = "numpy",
    *,
    bugs: Sequence[str] = (),
    coverage: bool = False,
    timeout: float | None = None,
) -> CheckResult:
    """Checks that an engine answers every operation of recorded logs as the recorded engine did (`hkv check`).

    Args:
      logs: files in the format of docs/oplog.md, or folders of `*.jsonl` files.
      engine: the engine.
      bugs: names of upstream defects to reproduce, besides those that headers name.
      coverage: whether to count the rules that the logs exercise.
      timeout: seconds that an engine in a process of its own may take for one answer; None for the default.

    Raises:
      FileError: a log cannot be read, is no log, or has a configuration that the engine cannot represent.
      ConfigError: no such engine or defect, or an engine that implements none of the logs.
      EngineProcessError: the engine cannot start.
    """
    checking = Check(engine, bugs, coverage, timeout)
    for path in find_logs([logs] if isinstance(logs, (str, os.PathLike)) else logs):
        checking.log(path)
    return checking.finished()


@dataclasses.dataclass(frozen=True)
class RecordResult:
    """A recorded log.

    Attributes:
      engine: name of the engine.
      dialect: name of the dialect.
      feature: feature of the traffic.
      seed: of the configuration and the traffic.
      version: of the log format.
      log: header and operations, each with the engine's answer.
      content: the file's bytes.
      rules: number of times that the log exercised each rule.
    """

    engine: str
    dialect: str
    feature: str
    seed: int
    version: int
    log: Log
    content: bytes
    rules: Mapping[str, int]

    def write(self, path: Path) -> None:
        """Writes the log, whole or not at all."""
        write_atomically(path, self.content)


def record(
    feature: str,
    seed: int,
    engine: EngineLike | None = None,
    *,
    dialect: str = registry.DEFAULT,
    kinds: Iterable[str] = (),
    max_groups: int | None = None,
    version: int | None = None,
    steps: int = 16,
    timeout: float | None = None,
) -> RecordResult:
    """Records a log of random traffic from an engine, to check other engines against (`hkv record`).

    Args:
      feature: feature of the traffic.
      seed: of the configuration and the traffic; the same seed, the same log.
      engine: the engine; None for the dialect's default.
      dialect: name of the dialect, as headers give it.
      kinds: only groups of these kinds; none for all.
      max_groups: most groups; None for any number.
      version: of the log format; None for the first from 2 on that has these kinds.
      steps: scheduling steps.
      timeout: as in `check`.

    Raises:
      HKVError: no such dialect, feature, kind, version or engine; an engine that cannot represent the configuration or
        refused a legal operation.
    """
    only = Only(frozenset(kinds), max_groups, dialect)
    rules = registry.dialect_of(dialect)
    version = version or next(each for each in rules.drawn_versions(only.kinds) if each >= RECORDED)
    name, factory = named_engine(rules.default_recorded if engine is None else engine, timeout)
    recording: Recording = record_traffic(factory, feature, seed, version, steps, only)
    content = log_bytes(recording.header, recording.operations, recording.answers)
    log = parse_log(content, f"{feature}-{seed}")
    return RecordResult(name, dialect, feature, seed, version, log, content, rules.exercised(log))


def explain(log: Path | Log, line: int, request: str | None = None) -> Explanation:
    """Account of a request up to a line of a log, and of why its hit is not longer (`hkv explain`).

    Args:
      log: the log, or its file.
      line: 1-based line number of an operation; the header is line 1.
      request: the request; None for the one that the line names.

    Raises:
      FileError: the log cannot be read, or has no such line.
      ConfigError: the line names no request and none was given, or it has not arrived.
      UnsupportedConfigError: the log's dialect gives no such account.
    """
    read = log if isinstance(log, Log) else read_log(log)
    return registry.dialect_of(read.header.dialect).explain(read, line, request) or account(read, line, request)


# Account of a request and its blocks up to a line of a log, and of why its hit is not longer: its form.
#
# Dialects give the account (`Dialect.explain`); this is what it consists of.


def account(log: Log, line: int, request: str | None = None) -> Explanation:
    """Account from `Dialect.resumptions` and the answers of a built-in engine; without an account of blocks."""
    dialect = registry.dialect_of(log.header.dialect)
    operation, id, before = find_request(log, line, request, type(None))
    make = dialect.engine(REFERENCE)
    if make is None:
        raise UnsupportedConfigError("dialect", log.header.dialect, f"a dialect with an engine {REFERENCE}")
    engine, departed, events = make(log.header), None, list[Event]()
    for number, each in enumerate(log.operations[:before], 2):
        answer = dialect.perform(engine, each)
        if departed is None and dialect.compare(getattr(each, "want", None), answer, log.header.oplog) is not None:
            departed = number
        if getattr(each, "id", None) == id:
            events.append((number, f"{describe(each)}{_said(answer)}"))
    try:
        groups = tuple(dialect.resumptions(engine, operation, id))
    except LookupError:
        raise ConfigError("request", id, f"a request that is there before line {line}, or comes with it") from None
    answer = dialect.perform(engine, operation)
    if departed is None and dialect.compare(getattr(operation, "want", None), answer, log.header.oplog) is not None:
        departed = line
    return Explanation(
        line=line,
        operation=describe(operation),
        answer=_said(answer),
        departed=departed,
        request=id,
        situation=f"named by {counted(len(events), 'operation')}",
        events=tuple(events),
        blocks={},
        alignment=math.lcm(*(group.block_size for group in groups)),
        hit=min(group.largest for group in groups),
        found=None,
        causes=(),
        groups=groups,
    )


def _said(answer: Any) -> str:
    return "" if answer is None else f" answers {msgspec.json.encode(answer).decode()}"
