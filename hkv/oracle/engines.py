"""The engines that commands can drive, by name; each module is imported only when its engine is asked for."""

from __future__ import annotations

import contextlib
import inspect
import os
import select
import shlex
import signal
import subprocess
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.log import answer_type
from hkv.errors import (
    ConfigError,
    EngineProcessError,
    EngineTimeoutError,
    OperationError,
    UnsupportedConfigError,
)
from hkv.files import LINES_IN_LIMIT, input_limit
from hkv.foreign import own_warnings, python_function, split_name

REFERENCE = "numpy"
"""Name that a dialect gives to its reference."""


def built_in() -> tuple[str, ...]:
    """Names of built-in engines, of every dialect."""
    return tuple(dict.fromkeys(name for dialect in registry.dialects() for name in dialect.engines))


def trusted_first(engines: Sequence[Any], dialect: str) -> tuple[Any, Any]:
    """Two engines, the one that counts and the one in doubt, whichever was named first.

    A reference counts before any other engine, HKV's compiled form before engines of others: those that drive an
    installed package, run in a process or are somebody's class. Of two of one standing, the second counts.
    """
    rules = registry.dialect_of(dialect)

    def standing(engine: Any) -> int:
        own = [name for name in rules.engines if name not in rules.engine_versions]
        names = [engine] if isinstance(engine, str) else [name for name in own if rules.engine(name) is engine]
        return max((1 + (name == REFERENCE) for name in names if name in own), default=0)

    first, second = engines
    return (first, second) if standing(first) > standing(second) else (second, first)


def forms() -> str:
    """Forms in which an engine may be named, for help texts and errors."""
    others = "NAME@VERSION for another version of an installed engine than the dialect's"
    program = "'cmd:PROGRAM ARGS' (docs/oplog.md), or FILE.py:CLASS or MODULE:CLASS (an Engine)"
    return f"{', '.join(built_in())}, {others}, {program}"


def engine_factory(name: str, timeout: float | None = None) -> EngineFactory:
    """The factory of the engine of that name.

    Args:
      name: of `built_in`; one of those that drive an installed engine, `@` and the version of it, whichever it is
        (`NAME@0.34.0`); `cmd:` and a command line, for an engine in a process of its own; or `FILE.py:NAME` or
        `MODULE:NAME`, for a class or function of the user's that takes a header.
      timeout: seconds that an engine in a process of its own may take for one answer; None for the default.

    Raises:
      ConfigError: there is no such engine.
      MissingExtraError: the engine needs a package that is not installed.
    """
    if name.startswith(PREFIX):
        command = name.removeprefix(PREFIX).strip()
        if not command:
            raise ConfigError("engine", name, "a command line after cmd:")
        return ProcessFactory(command, TIMEOUT if timeout is None else timeout)
    base, at, release = name.partition("@")
    if base in built_in():
        return _built_in(base, release if at else None)
    split_name("engine", name, forms())
    return python_function("engine", name, "taking a header")


def _built_in(name: str, release: str | None) -> EngineFactory:
    """Makes the engine of that name which the header's dialect has; `release` names a version of an installed one."""

    def make(header: Any) -> Any:
        dialect = registry.dialect_of(header.dialect)
        factory: Any = dialect.engine(name)
        if factory is None:
            raise ConfigError("engine", name, f"one of {header.dialect}'s: {', '.join(dialect.engines)}")
        if release is None:
            given = {}
        elif "release" not in inspect.signature(factory).parameters:
            raise ConfigError("engine", f"{name}@{release}", f"{name}: only an installed engine has versions")
        else:
            given = {"release": release}
        with own_warnings():
            return factory(header, **given)

    return make


# A process that speaks the process protocol: `docs/oplog.md`.

TIMEOUT = 10.0
"""Seconds that an engine may take for one answer unless told otherwise."""


class EngineProcess:
    """A process that speaks the process protocol, whatever the operations are; the header is sent as the first line.

    It refuses a configuration with UnsupportedConfigError or ConfigError, an operation with OperationError; from any
    method, EngineProcessError: it died, hung or broke the protocol. One of `idle`, which wait for another header, is
    taken before another is started, and goes back there where it says that it takes a header again.
    """

    def __init__(
        self, header: Any, command: str, timeout: float = TIMEOUT, idle: list[LineProcess] | None = None
    ) -> None:
        self._process = idle.pop() if idle else LineProcess(command, timeout)
        answer = said = self._say(msgspec.json.encode(header), "the header")
        if again := isinstance(said, dict) and said.get("again") is True:
            answer = {name: value for name, value in said.items() if name != "again"} or None
        self._end = weakref.finalize(self, _release, self._process, idle if again else None)
        self.lacks: tuple[str, ...] = ()
        match answer:
            case None:
                pass
            case {"unsupported": why, **more} if not more:
                self.close()
                raise UnsupportedConfigError("header", why, "a configuration that the engine implements")
            case {"error": why, **more} if not more:
                self.close()
                raise ConfigError("header", why, "a configuration that the engine accepts")
            case {"lacks": [*names], **more} if not more:
                self.lacks = tuple(map(str, names))
            case _:
                forms = 'null, {"again": true}, {"lacks": [...]}, {"unsupported": "why"} or {"error": "why"}'
                self._babble(said, f"{forms} to the header")

    def close(self) -> None:
        """Ends the process, or has it wait for another header; so does the end of this object."""
        self._end()

    def perform(self, operation: Any) -> Any:
        """Has it perform one operation and reads the answer as the type that the operation declares."""
        fields = msgspec.to_builtins(operation)
        fields.pop("want", None)
        return self._exchange(fields, answer_type(type(operation)))

    # Questions of a replay, which no log has.

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int | None = None) -> None:
        """A request arrives of which only length and prefix keys are known."""
        more = {} if reserve is None else {"reserve": reserve}
        self._exchange({"op": "request_keyed", "id": id, "num_tokens": num_tokens, "keys": list(keys), **more}, None)

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens are appended to a keyed request."""
        self._exchange({"op": "extend", "id": id, "tokens": tokens}, None)

    def num_free(self) -> int:
        """Blocks in the free queue."""
        return self._exchange({"op": "num_free"}, int)

    def num_available(self) -> int:
        """Blocks that no request and no connector holds, over all pools."""
        return self._exchange({"op": "num_available"}, int)

    def _exchange(self, fields: dict[str, Any], answered: Any) -> Any:
        """Sends an operation as plain values and reads the answer as that type."""
        what = f"{fields['op']} {fields['id']}" if "id" in fields else fields["op"]
        answer = self._say(msgspec.json.encode(fields), what)
        if isinstance(answer, dict) and set(answer) == {"error"}:
            raise OperationError(what, answer["error"], "an operation that the engine performs")
        try:
            return msgspec.convert(answer, answered)
        except msgspec.ValidationError as error:
            self._babble(answer, f"the answer to {what}: {str(error).replace('`', '')}")

    def _say(self, line: bytes, what: str) -> Any:
        answer = self._process.ask(line, what)
        try:
            return msgspec.json.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._babble(answer.decode("utf-8", "replace"), f"one line of JSON in answer to {what} ({error})")

    def _babble(self, answer: Any, expected: str) -> NoReturn:
        self._process.close()
        raise EngineProcessError("engine wrote", answer, expected)


# An engine in a process of its own, in any language: `docs/oplog.md`, "The process protocol".

PREFIX = "cmd:"
"""Prefix of the name of such an engine; its command line follows."""


class ProcessFactory:
    """Makes engines of a program by its command line, split as a shell would; no shell runs.

    A program that says that it takes another header is kept, and asked again once an engine of it is let go; any other
    is started afresh for every header.
    """

    def __init__(self, command: str, timeout: float = TIMEOUT) -> None:
        self._command, self._timeout = command, timeout
        self._idle: list[LineProcess] = []

    def __call__(self, header: Any) -> Any:
        speaker = EngineProcess(header, self._command, self._timeout, self._idle)
        return registry.dialect_of(header.dialect).process_engine(speaker)

    def restart(self) -> bool:
        """Has the next header sent to a fresh process; whether one was kept."""
        kept, self._idle = self._idle, []
        for process in kept:
            process.close()
        return bool(kept)


def _release(process: LineProcess, idle: list[LineProcess] | None) -> None:
    """Lets go of a process: it waits among `idle` if it can, else it ends."""
    process.close() if idle is None or not process.alive else idle.append(process)


# A child process that is spoken to line by line, neither side ever waited for longer than a timeout.

PATIENCE = 1.0
"""Seconds that a process has to end by itself once its input was closed."""

RECEIVED = 1 << 16
"""Most bytes that are read at once."""


class LineProcess:
    """A process; its standard error is ours. It ends with this object at the latest, with all that it started.

    It leads a session of its own, so that what it started can be ended with it; Ctrl-C reaches HKV, which ends it.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self.command = command
        self._timeout = timeout
        self._rest = b""
        try:
            arguments = shlex.split(command)
            if not arguments:
                raise ValueError("no program named")
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EngineProcessError("engine", f"cmd:{command}", f"a program that starts ({reason})") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, line: bytes, what: str) -> bytes:
        """Sends a line and returns the one that comes back, both without their newline."""
        if not self.alive:
            raise EngineProcessError("engine", f"cmd:{self.command}", f"a process that still runs, to answer {what}")
        try:
            self._check_silent(what)
            self._write(line + b"\n", what)
            return self._read(what)
        except EngineProcessError:
            self.close()
            raise
        except KeyboardInterrupt:
            _kill_session(self._process)  # at once: an interrupted command ends without waiting for anyone
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """True until it was ended from here."""
        return self._end.alive

    def close(self) -> None:
        """Ends the process: closes its input, waits a moment, kills what is left."""
        self._end()

    def _check_silent(self, what: str) -> None:
        if self._rest or select.select([self._output], [], [], 0)[0]:
            text = self._rest or self._receive(what)
            expected = f"nothing more before it is asked for {what}; one line an operation"
            raise EngineProcessError("engine wrote", _shown(text), expected)

    def _write(self, data: bytes, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while data:
            if not select.select([], [self._input], [], max(0.0, deadline - time.monotonic()))[1]:
                self._too_slow(f"{what} to be read")
            try:
                data = data[os.write(self._input, data) :]
            except BrokenPipeError:
                self._died(what)

    def _read(self, what: str) -> bytes:
        deadline = time.monotonic() + self._timeout
        longest = input_limit() // LINES_IN_LIMIT
        found = bytearray()
        while (end := found.find(b"\n", max(0, len(found) - RECEIVED))) < 0:
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._too_slow(f"an answer to {what}" + (f" beyond {_shown(found)}" if found else ""))
            self._rest = bytes(found[:RECEIVED])  # for messages, should it end now
            found += self._receive(what)
            if len(found) > longest:
                expected = f"a line of at most {longest:,} bytes, in answer to {what}"
                raise EngineProcessError("engine wrote", _shown(found), expected)
        self._rest = bytes(found[end + 1 :])
        return bytes(found[:end])

    def _receive(self, what: str) -> bytes:
        data = os.read(self._output, RECEIVED)
        if not data:
            self._died(what)
        return data

    def _too_slow(self, wanted: str) -> None:
        raise EngineTimeoutError("engine", f"silent for {self._timeout:g} seconds", wanted)

    def _died(self, what: str) -> None:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise EngineProcessError("engine", "closed its pipes", f"an answer to {what}") from None
        half = f" after {_shown(self._rest)}" if self._rest else ""
        raise EngineProcessError("engine", f"ended with {_status(code)}{half}", f"an answer to {what}")


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _shown(data: bytes | bytearray, limit: int = 80) -> str:
    text = data[: 4 * limit].decode("utf-8", "replace").rstrip("\n")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    _kill_session(process)
    process.wait()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all that it started and that did not leave its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
