"""Messages as prompts: what stands around each, and the tokens of all, by a `tokenizer.json` or byte by byte."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hkv.errors import FileError, MissingExtraError
from hkv.replay.traces.imports.imported import Fields, Imported


@dataclasses.dataclass(frozen=True)
class Template:
    """Text around a message's own. A `{role}` is replaced.

    Attributes:
      end: right after it; a model generates it at an answer's end.
      after: after that.
    """

    before: str = ""
    end: str = ""
    after: str = ""


TEMPLATES = {"plain": Template(), "chatml": Template("<|im_start|>{role}\n", "<|im_end|>", "\n")}
"""By name: nothing at all, and OpenAI's ChatML, which Qwen and others use."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A message: who says it, and its text."""

    role: str
    text: str


class Prompts:
    """Makes requests of messages. Pieces of text become tokens one by one, so that equal messages are equal tokens
    wherever they stand: a prompt that goes on from another one begins with all of its tokens and those of its answer.
    """

    def __init__(self, tokenize: Tokenize, template: Template) -> None:
        self._tokenize, self._template = tokenize, template

    def request(
        self, entry: Fields, messages: Sequence[Message], answer: str | None, output: int | None, **rest: Any
    ) -> Imported:
        """The request that asks for what follows these messages."""
        pieces = [piece for message in messages for piece in self._pieces(message)]
        pieces.append(self._template.before.format(role="assistant"))
        tokens = [token for piece in pieces for token in self._tokenize(piece)]
        if not tokens:
            raise entry.error("", [message.text for message in messages], "a prompt of at least one token")
        if answer is None and output is None:
            raise entry.error("", "an answer of unknown length", "one, or its length, or --output-tokens")
        said = None if answer is None else [*self._tokenize(answer), *self._tokenize(self._template.end)]
        length = len(said) if said is not None else output or 0
        return Imported(
            line=entry.line,
            input_length=len(tokens),
            output_length=length,
            tokens=tokens,
            output_tokens=said,
            **{"timestamp": None, **rest},
        )

    def _pieces(self, message: Message) -> tuple[str, ...]:
        template = self._template
        return template.before.format(role=message.role), message.text, template.end, template.after


def text_of(entry: Fields, field: str, message: dict[str, Any]) -> str:
    """The text of an OpenAI message: its content, a text or parts that are texts, and its tool calls as JSON."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise entry.error(f"{field}.content", part, "a text, or parts that are texts")
        texts.append(text)
    if calls:
        texts.append(msgspec.json.encode(calls).decode())
    if content is None and not calls:
        raise entry.error(f"{field}.content", None, "a text, or tool_calls")
    return "".join(texts)


Tokenize = Callable[[str], Sequence[int]]

BYTES = "bytes"
"""Name of the tokenizer that makes a token of every byte of UTF-8."""


def load_tokenizer(path: str) -> Tokenize:
    """A function from a piece of text to its tokens, none added at its ends; what it was given before, it remembers."""
    if path == BYTES:
        return lambda text: text.encode()
    try:
        package: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise MissingExtraError("tokenizers", "traces", "to make tokens of texts") from None
    try:
        tokenizer = package.Tokenizer.from_file(path)
    except Exception as error:  # the package raises nothing narrower
        raise FileError(path, None, "", str(error), "a tokenizer.json") from None
    known: dict[str, list[int]] = {}

    def tokenize(text: str) -> list[int]:
        if text not in known:
            known[text] = tokenizer.encode(text, add_special_tokens=False).ids
        return known[text]

    return tokenize
