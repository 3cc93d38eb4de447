"""Texts as tokens, by a `tokenizer.json`, or byte by byte."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from hkv.errors import FileError, MissingExtraError

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
