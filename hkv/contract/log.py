"""Logs: header and operations as structs, the order in which operations may come, and checks that types cannot make.

A dialect whose rules ask for no more has `PlainHeader`, `PlainOperation`s and `NamedRequests`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from hkv.errors import FileError, HKVError, OperationError
from hkv.files import refuse_repeated

LARGEST = 2**31 - 1
"""Largest token id, block id and count that a log may hold."""


_ANYTHING = msgspec.json.Decoder()


@dataclasses.dataclass(frozen=True)
class Log:
    """A log.

    Attributes:
      path: its origin, as the caller named it.
      header: the configuration, as its dialect's `log.header`.
      operations: the operations in order; number `i` stands on line `i + 2`.
    """

    path: str
    header: Any
    operations: tuple[Any, ...]


def describe(operation: Any, limit: int = 160, plain: bool = False) -> str:
    """One operation on one line, without its answer, shortened; `plain` leaves out what is zero, false or none."""
    fields = msgspec.to_builtins(operation)
    told = ((name, value) for name, value in fields.items() if name not in ("op", "want") and (value or not plain))
    text = " ".join(f"{name}={_text(value)}" for name, value in told)
    text = f"{fields['op']} {text}".strip()
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode() if not isinstance(value, str) else value


class Lifecycle(Protocol):
    """Follows the operations of a log: which may come next, and what a shortened case owes."""

    def follow(self, operation: Any) -> None:
        """Checks one operation and, as far as that needs no answer, performs it.

        Raises:
          OperationError: names the field that does not fit what came before; nothing changed.
        """

    def answered(self, operation: Any, answer: Any) -> None:
        """Takes note of what the answer to an operation decides."""


class PlainHeader(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The first line of a log, where a dialect has nothing to add: one pool, and groups by kind and block size.

    Attributes:
      oplog: version of the log format.
      dialect: name of the dialect whose rules the log follows.
      feature: feature of the traffic.
      num_blocks: blocks of the pool.
      groups: of each, `kind` and `block_size` at least.
      bugs: names of upstream defects that are reproduced.
    """

    oplog: int = 2
    dialect: str
    feature: str
    num_blocks: int
    groups: list[dict[str, Any]]
    bugs: list[str] = []


class PooledHeader(PlainHeader, kw_only=True):
    """`PlainHeader` of a cache in which each group has a pool of its own.

    Attributes:
      num_blocks: blocks of each group's pool.
    """

    num_blocks: list[int]  # pyright: ignore[reportIncompatibleVariableOverride] - decoded, never assigned


class PlainOperation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="op"):
    """An operation. One that is answered has a field `want`, None by default, whose type is that of its answer."""


@functools.cache
def answer_type(operation: type[Any]) -> Any:
    """Type of the answer to an operation; None if it has no answer."""
    want = typing.get_type_hints(operation).get("want")
    return next((each for each in typing.get_args(want) if each is not type(None)), None)


@functools.cache
def later_fields(struct: type[Any]) -> tuple[tuple[str, int], ...]:
    """Fields that a later version of a format adds to a struct, and that version: `Meta(extra={"since": ...})`."""
    found = []
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        extra = [each.extra for each in getattr(hint, "__metadata__", ()) if each.extra and "since" in each.extra]
        found += [(name, each["since"]) for each in extra]
    return tuple(found)


class NamedRequests:
    """A lifecycle: requests arrive under a name that none has, and end; whatever else names one, it has arrived.

    Args:
      arrives: the operation by which a request arrives.
      ends: the operation by which it ends.
      granted: whether an answer to an arrival lets the request in.
    """

    def __init__(self, arrives: type, ends: type, granted: Callable[[Any], bool] = lambda answer: True) -> None:
        self._arrives, self._ends, self._granted = arrives, ends, granted
        self._names: set[str] = set()

    def follow(self, operation: Any) -> None:
        """Checks one operation, and ends a request.

        Raises:
          OperationError: a name that is taken, or one that no request has; nothing changed.
        """
        id = getattr(operation, "id", None)
        if id is None:
            return
        if (id in self._names) == isinstance(operation, self._arrives):
            raise OperationError("id", id, "a name that no request has" if id in self._names else "a request's name")
        if isinstance(operation, self._ends):
            self._names.remove(id)

    def answered(self, operation: Any, answer: Any) -> None:
        """Lets a request in."""
        if isinstance(operation, self._arrives) and self._granted(answer):
            self._names.add(operation.id)


class LogFormat:
    """Header and operations of a dialect's logs.

    A subclass checks more, where structs do not say it all.

    Args:
      header: struct of the first line; has `oplog`, `dialect`, `feature`, `num_blocks`, `groups` and `bugs`.
      operations: struct of each operation, by its `op`; one that is answered has a field `want`.
      check: raises an HKVError for a header that the dialect forbids.
      smallest: of the numbers of a field, the smallest that is legal, where that is not 0.
      prefix: prefix of the names of its definitions in the published JSON schema.

    Attributes:
      header: as given.
      operations: by name.
      check: as given.
    """

    def __init__(
        self,
        header: type[Any],
        operations: Sequence[type[Any]],
        check: Callable[[Any], object],
        smallest: Mapping[str, int] | None = None,
        prefix: str = "",
    ) -> None:
        self.header = header
        self.operations = {str(operation.__struct_config__.tag): operation for operation in operations}
        self.prefix = prefix
        self.check = check
        self._smallest = dict(smallest or {})
        self._header_decoder = msgspec.json.Decoder(header)
        self._decoders = {name: msgspec.json.Decoder(operation) for name, operation in self.operations.items()}

    def parse_header(self, line: bytes, found: dict[str, Any], path: str) -> Any:
        """The header that the first line is; `found` is what `parse_object` says of it.

        Raises:
          FileError: it is none, or the dialect forbids it.
        """
        header = decode(self._header_decoder, line, found, path, 1)
        self.check_header(header, path)
        if not header.feature:
            raise FileError(path, 1, "feature", header.feature, "what the log is about, in a word")
        try:
            self.check(header)
        except HKVError as error:
            raise FileError(path, 1, error.argument, error.value, error.expected) from error
        return header

    def check_header(self, header: Any, path: str) -> None:
        """Checks the header's numbers.

        Raises:
          FileError: one is out of range.
        """
        self._check_numbers(msgspec.to_builtins(header), path, 1)

    def parse_operation(self, line: bytes, path: str, number: int, header: Any) -> Any:
        """The operation that a line is.

        Raises:
          FileError: it is none.
        """
        found = parse_object(line, path, number)
        name = found.get("op")
        if not isinstance(name, str) or name not in self.operations:
            raise FileError(path, number, "op", name, f"one of {', '.join(self.operations)}")
        operation = decode(self._decoders[name], line, found, path, number)
        self.check_operation(operation, found, path, number, header)
        return operation

    def check_operation(self, operation: Any, found: dict[str, Any], path: str, number: int, header: Any) -> None:
        """Checks an operation's numbers.

        Raises:
          FileError: a number is out of range.
        """
        self._check_numbers({key: value for key, value in found.items() if key != "want"}, path, number)

    def encode_answer(self, answer: Any) -> Any:
        """An answer as JSON values."""
        return msgspec.to_builtins(answer)

    def schema(self) -> dict[str, Any]:
        """Definitions of the JSON schema (draft 2020-12) by name: `header`, `operation`, and each struct.

        Structs say it all; fields with a default may be left out, but what the engine answered must be there.
        """
        template = f"#/$defs/{self.prefix}{{name}}"
        names, parts = msgspec.json.schema_components([self.header, *self.operations.values()], ref_template=template)
        for operation in self.operations.values():
            part = parts[operation.__name__]
            if want := part["properties"].get("want"):
                (part["properties"]["want"],) = (form for form in want["anyOf"] if form != {"type": "null"})
                part["required"].append("want")
        parts.update(header=names[0], operation={"oneOf": list(names[1:])})
        return {self.prefix + name: part for name, part in parts.items()}

    def _check_numbers(self, fields: dict[str, Any], path: str, number: int) -> None:
        for name, value in fields.items():
            least = self._smallest.get(name, 0)
            for each in _integers(value):
                if not least <= each <= LARGEST:
                    raise FileError(path, number, name, each, f"from {least} to {LARGEST}")


def check_answered(operation: Any, path: str, number: int) -> None:
    """Make sure that an operation which has an answer holds one.

    Raises:
      FileError: it does not.
    """
    if "want" in type(operation).__struct_fields__ and operation.want is None:
        raise FileError(
            path, number, "want", None, "what the recorded engine answered (hkv check --fill has one answer)"
        )


def _integers(value: Any) -> Iterable[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _integers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(inner)


def parse_object(line: bytes, path: str, number: int) -> dict[str, Any]:
    """The JSON object that one line of a log is.

    Raises:
      FileError: it is none.
    """
    try:
        found = _ANYTHING.decode(line)
        refuse_repeated(line, found, path, number)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        text = line[:80].decode("utf-8", "replace")
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise FileError(path, number, "", text, f"one JSON object ({problem})") from error
    if not isinstance(found, dict):
        raise FileError(path, number, "", found, "one JSON object")
    return found


def decode(decoder: msgspec.json.Decoder[Any], line: bytes, found: object, path: str, number: int) -> Any:
    """One line as the typed value that a decoder makes; `found` is what `parse_object` says of it.

    Raises:
      FileError: a field is missing, unknown or of another type.
    """
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise _explain(str(error), found, path, number) from error


def _explain(message: str, found: object, path: str, number: int) -> FileError:
    message, _, where = message.partition(" - at ")
    field = where.strip("`").removeprefix("$").removeprefix(".")
    if named := re.match(r"Object (contains unknown|missing required) field `(.*)`", message):
        problem, name = named.groups()
        parent = _at(found, field)
        field = f"{field}.{name}" if field else name
        value = parent.get(name) if isinstance(parent, dict) else None
        expected = "no such field" if problem.startswith("contains") else "to be given"
        return FileError(path, number, field, value, expected)
    expected = re.sub(r"^Expected ", "", message).replace("`", "")
    return FileError(path, number, field, _at(found, field), expected)


def _at(found: object, field: str) -> object:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and index and int(index) < len(found):
            found = found[int(index)]
        else:
            return found
    return found
