"""Reads request traces, one JSON object a line, and says what is wrong with a line that cannot be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
    "sharegpt": ('"conversations"',),
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
    `output_tokens`. `tokens_per_id` and `synthetic` may stand beside them; other fields are ignored.

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
            line = _Line(path, number, text)
            if "hash_ids" in line.fields:
                tokens_per_id = line.tokens_per_id(tokens_per_id)
            request = line.request(tokens_per_id or TOKENS_PER_ID)
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

    What does not begin as JSON does may be a prompt: plain text.
    """
    start = text[:10_000].decode("utf-8", "replace").strip()
    name = next((name for name, words in OTHERS.items() if all(word in start for word in words)), None)
    if name is None and start[:1].isalpha():
        name = "text"
    if name is None:
        return None
    expected = f"HKV's own format, of which `hkv trace import {path} --from {name} -o FILE` makes one"
    return FileError(path, number, "", start[:40], expected)


def _check_prefixes(line: _Line, hash_ids: list[int], predecessors: dict[int, tuple[int, int]]) -> None:
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


class _Line:
    """One line, decoded."""

    def __init__(self, path: str, number: int, text: bytes) -> None:
        self.path = path
        self.number = number
        value = decode_json(text, path, number, "a JSON object")
        if not isinstance(value, dict):
            raise self.error("", value, "a JSON object")
        self.fields: dict[str, Any] = value

    def error(self, field: str, value: object, expected: str) -> FileError:
        return FileError(self.path, self.number, field, value, expected)

    def tokens_per_id(self, expected: int | None) -> int:
        """Tokens that its ids stand for, which are `expected` where that is known."""
        if "tokens_per_id" not in self.fields:
            return expected or TOKENS_PER_ID
        found = self._integer("tokens_per_id", 1)
        if expected is not None and found != expected:
            raise self.error("tokens_per_id", found, f"{expected}: all ids of a trace stand for equally many tokens")
        return found

    def request(self, tokens_per_id: int) -> TraceRequest:
        timestamp = self._timestamp()
        if "tokens" in self.fields:
            return self._token_list(timestamp)
        if "hash_ids" not in self.fields:
            raise self.error("hash_ids", None, "to be given, or else tokens")
        length = self._integer("input_length", 1)
        output = self._integer("output_length", 0)
        if self.fields["hash_ids"] is None:
            return TraceRequest(line=self.number, timestamp=timestamp, input_length=length, output_length=output)
        hash_ids = self._integers("hash_ids", None)
        counts = sorted({length // tokens_per_id, -(-length // tokens_per_id)})
        if len(hash_ids) not in counts:
            wanted = " or ".join(map(str, counts))
            expected = f"{wanted} of them, one for every {tokens_per_id} of the {length} tokens"
            raise self.error("hash_ids", f"{len(hash_ids)} ids", expected)
        return TraceRequest(
            line=self.number,
            timestamp=timestamp,
            input_length=length,
            output_length=output,
            hash_ids=hash_ids,
            tokens_per_id=tokens_per_id,
            synthetic=self._name("synthetic"),
        )

    def _token_list(self, timestamp: int | float) -> TraceRequest:
        if "hash_ids" in self.fields:
            raise self.error("hash_ids", self.fields["hash_ids"], "not to stand beside tokens")
        tokens = self._integers("tokens", MAX_TOKEN)
        if not tokens:
            raise self.error("tokens", tokens, "at least one token")
        if "input_length" in self.fields and self._integer("input_length", 1) != len(tokens):
            raise self.error("input_length", self.fields["input_length"], f"{len(tokens)}, the number of tokens")
        if "output_tokens" not in self.fields:
            if "output_length" not in self.fields:
                raise self.error("output_length", None, "to be given, or else output_tokens")
            length, output = self._integer("output_length", 0), None
        else:
            output = self._integers("output_tokens", MAX_TOKEN)
            length = len(output)
            if "output_length" in self.fields and self._integer("output_length", 0) != length:
                expected = f"{length}, the number of output_tokens"
                raise self.error("output_length", self.fields["output_length"], expected)
        return TraceRequest(
            line=self.number,
            timestamp=timestamp,
            input_length=len(tokens),
            output_length=length,
            tokens=tokens,
            output_tokens=output,
            tokens_per_id=1,
            synthetic=self._name("synthetic"),
        )

    def _name(self, field: str) -> str:
        value = self.fields.get(field, "")
        if not isinstance(value, str):
            raise self.error(field, value, "a name")
        return value

    def _timestamp(self) -> int | float:
        value = self.fields.get("timestamp")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TIMESTAMP:
            return value
        raise self.error("timestamp", value, f"a number of milliseconds from 0 to {MAX_TIMESTAMP}")

    def _integer(self, field: str, least: int) -> int:
        value = self.fields.get(field)
        if type(value) is not int or not least <= value <= MAX_LENGTH:
            raise self.error(field, value, f"an integer from {least} to {MAX_LENGTH}")
        return value

    def _integers(self, field: str, most: int | None) -> list[int]:
        values = self.fields[field]
        expected = "a non-negative integer" if most is None else f"an integer from 0 to {most}"
        if not isinstance(values, list):
            raise self.error(field, values, f"a list, each element {expected}")
        for index, value in enumerate(values):
            if type(value) is not int or value < 0 or (most is not None and value > most):
                raise self.error(f"{field}[{index}]", value, expected)
        return values


# Makes up token sequences that never repeat, the same on every machine.

VOCABULARY = 100_000
"""Tokens are numbers below this."""


class Texts:
    """An endless supply of tokens: the n-th depends on the seed and on n alone (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self._next = (seed % 2**31) << 33

    def new(self, length: int) -> np.ndarray:
        """The next `length` tokens, uint32."""
        state = np.arange(self._next, self._next + length, dtype=np.uint64)
        self._next += length
        with np.errstate(over="ignore"):
            state *= np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        return (state % np.uint64(VOCABULARY)).astype(np.uint32)
