"""HKV's own request traces, one JSON object a line: reading them, saying what is wrong with a line, writing them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hkv.errors import FileError
from hkv.files import decode_json, lines_of, opened, shown

MAX_LENGTH = 2**31 - 1
"""Most tokens a prompt or an output may have."""

MAX_TOKEN = 2**32 - 1
"""Largest token number of a token list."""

MAX_TIMESTAMP = 2**53
"""Latest arrival, in milliseconds."""

TOKENS_PER_ID = 512
"""Tokens that one of Mooncake's `hash_ids` stands for."""

OTHERS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("num_prefill_tokens", "num_decode_tokens"),
    "splitwise": ("arrival_timestamp", "prompt_size", "token_size"),
    "agentic": ('"block_size"', '"requests"', '"hash_ids"'),
    "sharegpt": ('"conversations"',),
    "lmsys": ('"conversation_id"', '"conversation"'),
    "wildchat": ('"conversation_hash"', '"conversation"'),
    "openai-batch": ('"custom_id"', '"body"'),
    "openai-chat": ('"messages"',),
    "prompts": ('"prompt"',),
    "operation-log": ('"oplog"',),
}
"""Formats of others that their first line shows, by words that all stand in it; `hkv trace import` reads them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request as a trace gives it.

    Attributes:
      line: 1-based line of the file.
      timestamp: time of arrival, in milliseconds from the start of the trace.
      input_length: tokens of its prompt, at least 1.
      output_length: tokens that it generates.
      hash_ids: one id for every `tokens_per_id` tokens of the prompt; None for a token list, or where nothing is known.
      tokens: the prompt itself, where the trace gives it.
      output_tokens: the tokens that it generates, where the trace gives them.
      tokens_per_id: tokens that one of its ids stands for; 1 for a token list, 0 where the trace names no content.
      synthetic: name of the model that its prefix was made up by, or "".
    """

    line: int
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    tokens: list[int] | None = None
    output_tokens: list[int] | None = None
    tokens_per_id: int = 0
    synthetic: str = ""


def read_trace(path: str, tokens_per_id: int | None = None, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yields the requests of a trace in order, checking each line as it is read. Empty lines are passed over.

    A line is an object with `timestamp` and either `input_length`, `output_length`, `hash_ids` (the format published
    with Mooncake, FAST'25; null where nothing is known but the lengths) or `tokens` and one of `output_length`,
    `output_tokens`. `tokens_per_id` and `synthetic` may stand next to them; other fields are ignored.

    Args:
      path: the file, UTF-8, perhaps compressed by gzip or Zstandard; `-` is standard input.
      tokens_per_id: tokens that one of the `hash_ids` stands for; None for what the lines say, or else
        `TOKENS_PER_ID`, as Mooncake's own traces do not say it.
      limit: most requests to yield, or None for all.

    Raises:
      FileError: the file cannot be read, has no request, or a line is not as it should be.
      MissingExtraError: a Zstandard file without the package for it.
    """
    with opened(path) as file:
        yield from _read_lines(shown(path), file, tokens_per_id, limit)


def granularity(requests: Sequence[TraceRequest]) -> int:
    """Tokens of the finest part that a trace names: of an id; 1 for tokens; 0 where it names no content at all."""
    return max((request.tokens_per_id for request in requests), default=0)


def _read_lines(path: str, file: Any, tokens_per_id: int | None, limit: int | None) -> Iterator[TraceRequest]:
    predecessors: dict[int, tuple[int, int]] = {}
    latest: int | float = 0
    count = 0
    for number, text in enumerate(lines_of(file, path), start=1):
        if count == limit:
            return
        if not text.strip():
            continue
        try:
            line = Fields.of(path, number, text)
            if "hash_ids" in line.values:
                tokens_per_id = _tokens_per_id(line, tokens_per_id)
            request = _request(line, tokens_per_id or TOKENS_PER_ID)
        except FileError as error:
            raise (error if count else _in_another_format(path, number, text) or error) from None
        if request.timestamp < latest:
            raise line.error("timestamp", request.timestamp, f"at least {latest}, the one before")
        latest = request.timestamp
        _check_prefixes(line, request.hash_ids or [], predecessors)
        count += 1
        yield request
    if not count:
        raise FileError(path, None, "", "no request", "at least one request")


def _in_another_format(path: str, number: int, text: bytes) -> FileError | None:
    """The error that names the format of a first line, and the command that reads it; None where it shows none.

    What does not begin as JSON does may be a heading or a prompt: plain text.
    """
    start = text[:10_000].decode("utf-8", "replace").strip()
    name = next((name for name, words in OTHERS.items() if all(word in start for word in words)), None)
    if name is None and (known := csv_formats(start)):
        expected = f"HKV's own format, or a CSV with the columns of {', '.join(known)}"
        return FileError(path, number, "", start[:40], expected)
    if name is None and start[:1].isalpha():
        name = "text"
    if name is None:
        return None
    expected = f"HKV's own format, of which `hkv trace import {path} --from {name} -o FILE` makes one"
    return FileError(path, number, "", start[:40], expected)


def csv_formats(start: str) -> list[str]:
    """Formats that may have this line for a heading: that whose columns it has, or all; none if it is none.

    Of a heading no comma stands before a space.
    """
    if not re.fullmatch(r"[^,;\t{\[]+([,;\t]\S[^,;\t]*)+", start):
        return []
    columns = {name: words for name, words in OTHERS.items() if not any('"' in word for word in words)}
    return [name for name, words in columns.items() if all(word in start for word in words)] or [*columns]


def _check_prefixes(line: Fields, hash_ids: list[int], predecessors: dict[int, tuple[int, int]]) -> None:
    """Equal ids mean equal blocks *and* equal prefixes: an id stands at one place, after one other id."""
    before = -1
    for index, hash_id in enumerate(hash_ids):
        place = (index, before)
        if predecessors.setdefault(hash_id, place) != place:
            first_index, first_before = predecessors[hash_id]
            after = f"after id {first_before}" if first_index else "at the start"
            expected = f"an id that names its whole prefix; {hash_id} stood before as number {first_index}, {after}"
            raise line.error(f"hash_ids[{index}]", hash_id, expected)
        before = hash_id


def _tokens_per_id(line: Fields, expected: int | None) -> int:
    """Tokens that a line's ids stand for, which are `expected` where that is known."""
    if "tokens_per_id" not in line.values:
        return expected or TOKENS_PER_ID
    found = line.integer("tokens_per_id", least=1)
    if expected is not None and found != expected:
        raise line.error("tokens_per_id", found, f"{expected}: all ids of a trace stand for equally many tokens")
    return found


def _request(line: Fields, tokens_per_id: int) -> TraceRequest:
    timestamp = line.number("timestamp", expected="a number of milliseconds")
    if "tokens" in line.values:
        return _token_list(line, timestamp)
    if "hash_ids" not in line.values:
        raise line.error("hash_ids", None, "to be given, or else tokens")
    length, output = line.integer("input_length", least=1), line.integer("output_length")
    common: dict[str, Any] = {"line": line.line, "timestamp": timestamp, "input_length": length}
    if line.values["hash_ids"] is None:
        return TraceRequest(**common, output_length=output)
    ids = line.ids("hash_ids", length, tokens_per_id)
    named = {"hash_ids": ids, "tokens_per_id": tokens_per_id, "synthetic": line.name("synthetic")}
    return TraceRequest(**common, output_length=output, **named)


def _token_list(line: Fields, timestamp: float) -> TraceRequest:
    values = line.values
    if "hash_ids" in values:
        raise line.error("hash_ids", values["hash_ids"], "not to stand beside tokens")
    tokens = line.integers("tokens", MAX_TOKEN)
    if not tokens:
        raise line.error("tokens", tokens, "at least one token")
    if "input_length" in values and line.integer("input_length", least=1) != len(tokens):
        raise line.error("input_length", values["input_length"], f"{len(tokens)}, the number of tokens")
    output = line.integers("output_tokens", MAX_TOKEN) if "output_tokens" in values else None
    if output is None and "output_length" not in values:
        raise line.error("output_length", None, "to be given, or else output_tokens")
    length = line.integer("output_length") if output is None or "output_length" in values else len(output)
    if output is not None and length != len(output):
        raise line.error("output_length", length, f"{len(output)}, the number of output_tokens")
    return TraceRequest(
        line=line.line,
        timestamp=timestamp,
        input_length=len(tokens),
        output_length=length,
        tokens=tokens,
        output_tokens=output,
        tokens_per_id=1,
        synthetic=line.name("synthetic"),
    )


class Fields:
    """The named fields of one line, row or entry; errors name the place, the field and its value."""

    def __init__(self, path: str, line: int, values: Any) -> None:
        self.path, self.line = path, line
        if not isinstance(values, dict):
            raise self.error("", values, "a JSON object")
        self.values: dict[str, Any] = values

    @classmethod
    def of(cls, path: str, line: int, text: bytes) -> Fields:
        """Those of a JSON object."""
        return cls(path, line, decode_json(text, path, line, "a JSON object"))

    def error(self, field: str, value: object, expected: str) -> FileError:
        """The error to raise."""
        return FileError(shown(self.path), self.line, field, value, expected)

    def named(self, *names: str) -> str:
        """The first of these names that is there; the first of all where none is."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def integer(self, *names: str, least: int = 0) -> int:
        """An integer under one of these names."""
        name = self.named(*names)
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= MAX_LENGTH:
            raise self.error(name, value, f"an integer from {least} to {MAX_LENGTH}")
        return value

    def number(self, *names: str, expected: str = "a number") -> int | float:
        """A finite number of at least 0 under one of these names."""
        name = self.named(*names)
        value = self.values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TIMESTAMP:
            return value
        raise self.error(name, value, f"{expected} from 0 to {MAX_TIMESTAMP}")

    def integers(self, name: str, most: int | None = None) -> list[int]:
        """A list of integers from 0 to `most`."""
        values = self.values.get(name)
        expected = "a non-negative integer" if most is None else f"an integer from 0 to {most}"
        if not isinstance(values, list):
            raise self.error(name, values, f"a list, each element {expected}")
        for index, value in enumerate(values):
            if type(value) is not int or value < 0 or (most is not None and value > most):
                raise self.error(f"{name}[{index}]", value, expected)
        return values

    def ids(self, name: str, length: int, tokens_per_id: int) -> list[int]:
        """Ids that stand for `tokens_per_id` tokens each of so many, the last perhaps for fewer, or absent then."""
        values = self.integers(name)
        counts = sorted({length // tokens_per_id, -(-length // tokens_per_id)})
        if len(values) not in counts:
            wanted = " or ".join(map(str, counts))
            expected = f"{wanted} of them, one for every {tokens_per_id} (--tokens-per-id) of the {length} tokens"
            raise self.error(name, f"{len(values)} ids", expected)
        return values

    def name(self, field: str) -> str:
        """A text; "" if missing."""
        value = self.values.get(field, "")
        if not isinstance(value, str):
            raise self.error(field, value, "a name")
        return value


# Writing: requests from elsewhere, imported or made up, as lines.


@dataclasses.dataclass(slots=True, kw_only=True)
class NewRequest:
    """One request as its source gives it.

    Attributes:
      line: 1-based line, row or entry of the source, for messages.
      timestamp: arrival in milliseconds; None where the source gives no time.
      input_length: tokens of the prompt, at least 1.
      output_length: tokens that it generates.
      ids: one for every `tokens_per_id` tokens of the prompt, of blocks or of prefixes; None where there are none.
      tokens: the prompt's tokens, or None.
      output_tokens: tokens that it generated, or None.
      session: requests of one session follow each other; "" for a request by itself.
      delay: milliseconds from the end of the session's request before it, where the source says that and no time.
    """

    line: int
    timestamp: float | None
    input_length: int
    output_length: int
    ids: Sequence[int] | None = None
    tokens: Sequence[int] | np.ndarray | None = None
    output_tokens: Sequence[int] | np.ndarray | None = None
    session: str = ""
    delay: float | None = None


def own_lines(
    requests: Iterable[NewRequest], tokens_per_id: int | None, synthetic: str = ""
) -> Iterator[dict[str, Any]]:
    """One JSON object a request, as `read_trace` reads it, with the ids' granularity.

    Ids of a source are given anew, 0, 1, 2, ..., by what stands before them: whether they named blocks or whole
    prefixes, equal ones then mean equal prefixes. Where requests have tokens, ids are written in their stead, one for
    every `tokens_per_id` of the prompt, the last one for what is left, unless `tokens_per_id` is None.
    """
    chains = PrefixIds()
    for request in requests:
        line: dict[str, Any] = {"timestamp": _plain(request.timestamp or 0.0)}
        if request.tokens is not None and tokens_per_id is None:
            line["tokens"] = np.asarray(request.tokens).tolist()
            if request.output_tokens is None:
                line["output_length"] = request.output_length
            else:
                line["output_tokens"] = np.asarray(request.output_tokens).tolist()
        else:
            ids = None
            if request.tokens is not None:
                ids = chains.of_tokens(np.asarray(request.tokens), tokens_per_id or 1)
            elif request.ids is not None:
                ids = chains.of(request.ids)
            line |= {"input_length": request.input_length, "output_length": request.output_length, "hash_ids": ids}
            if ids is not None:
                line["tokens_per_id"] = tokens_per_id
        if synthetic:
            line["synthetic"] = synthetic
        yield line


def _plain(milliseconds: float) -> int | float:
    """Milliseconds, to a thousandth: seconds times 1,000 are not exact."""
    rounded = round(milliseconds, 3)
    return int(rounded) if rounded == int(rounded) else rounded


class PrefixIds:
    """Equal ids, equal blocks and equal prefixes; ids are 0, 1, 2, ... in the order in which they are met."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, Hashable], int] = {}

    def of(self, blocks: Iterable[Hashable]) -> list[int]:
        """Ids of what begins with the first block and ends with each."""
        parent, ids = -1, []
        for block in blocks:
            parent = self._ids.setdefault((parent, block), len(self._ids))
            ids.append(parent)
        return ids

    def of_tokens(self, tokens: np.ndarray, size: int) -> list[int]:
        """Ids of blocks of so many tokens, the last perhaps of fewer."""
        data = tokens.astype("<u4").tobytes()
        return self.of(data[start : start + 4 * size] for start in range(0, len(data), 4 * size))
