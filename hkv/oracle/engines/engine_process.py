"""A process that speaks the process protocol: `docs/oplog.md`."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from hkv.errors import ConfigError, EngineProcessError, OperationError, UnsupportedConfigError
from hkv.oracle.engines.line_process import LineProcess

TIMEOUT = 10.0
"""Seconds that an engine may take for one answer unless told otherwise."""


class EngineProcess:
    """A process that speaks the process protocol, whatever the operations are.

    Args:
      header: the configuration, sent as the first line.
      command: command line that starts it.
      timeout: seconds that one answer may take.

    Raises:
      UnsupportedConfigError: it does not implement this configuration.
      ConfigError: it says that the configuration is wrong.
      EngineProcessError: from here on any method: it died, hung or broke the protocol.
      OperationError: any method: it answered that it cannot perform the operation.
    """

    def __init__(self, header: Any, command: str, timeout: float = TIMEOUT) -> None:
        self._process = LineProcess(command, timeout)
        answer = self._say(msgspec.json.encode(header), "the header")
        if isinstance(answer, dict) and set(answer) == {"unsupported"}:
            self._process.close()
            raise UnsupportedConfigError("header", answer["unsupported"], "a configuration that the engine implements")
        if isinstance(answer, dict) and set(answer) == {"error"}:
            self._process.close()
            raise ConfigError("header", answer["error"], "a configuration that the engine accepts")
        self.lacks: tuple[str, ...] = ()
        if isinstance(answer, dict) and set(answer) == {"lacks"} and isinstance(answer["lacks"], list):
            self.lacks = tuple(map(str, answer["lacks"]))
        elif answer is not None:
            self._babble(answer, 'null, {"lacks": [...]}, {"unsupported": "why"} or {"error": "why"} to the header')

    def close(self) -> None:
        """Ends the process; it ends with this object in any case."""
        self._process.close()

    def perform(self, operation: Any) -> Any:
        """Has it perform an operation that says itself, in `answer_type`, what it is answered with."""
        return self.perform_as(operation, operation.answer_type)

    def perform_as(self, operation: Any, answer_type: Any) -> Any:
        """Has it perform one operation and reads the answer as that type."""
        fields = msgspec.to_builtins(operation)
        fields.pop("want", None)
        return self.exchange(fields, fields["op"], answer_type)

    def exchange(self, fields: dict[str, Any], name: str, answer_type: Any) -> Any:
        """Sends an operation of that name, as plain values, and reads the answer as that type."""
        what = f"{name} {fields['id']}" if "id" in fields else name
        answer = self._say(msgspec.json.encode(fields), what)
        if isinstance(answer, dict) and set(answer) == {"error"}:
            raise OperationError(what, answer["error"], "an operation that the engine performs")
        try:
            return msgspec.convert(answer, answer_type)
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
