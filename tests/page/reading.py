"""Reading of a page without a browser: its data unpacked, and the cells of a side put together again."""

from __future__ import annotations

import base64
import html.parser
import json
import zlib
from typing import Any

import numpy as np


class Markup(html.parser.HTMLParser):
    """Elements of a page and their texts, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = [("", {})]
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(("", {}))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1]
        self.texts[attributes.get("id") or tag] = self.texts.get(attributes.get("id") or tag, "") + data


def data_of(page: bytes) -> Any:
    """Data of a page."""
    return data_in(base64.b64decode(Markup(page.decode()).texts["data"]))


def data_in(content: bytes) -> Any:
    """Packed data, columns and texts put in their places."""
    content = zlib.decompress(content)
    length = int.from_bytes(content[:4], "little")
    base = 4 + length

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$" not in value:
            return {name: resolve(each) for name, each in value.items()}
        kind, offset, count = value["$"]
        if kind == "text":
            return content[base + offset : base + offset + count].decode()
        column = np.frombuffer(content, kind.rstrip("+"), count, base + offset).astype(np.int64)
        return np.cumsum(column) if kind.endswith("+") else column

    return resolve(json.loads(content[4:base]))


def cells_of(side: Any, at: int) -> dict[int, tuple[Any, ...]]:
    """Blocks that were ever more than free, after `at` operations: status, references, tokens, holders, key."""
    changes, holders = side["changes"], side["holders"]
    found = {}
    for row in np.flatnonzero(changes["at"] <= at):
        place = range(*holders["start"][changes["holders"][row] :][:2]) if changes["holders"][row] else range(0)
        held = sorted(
            (side["requests"][holders["request"][each]], int(holders["group"][each]), int(holders["column"][each]))
            for each in place
        )
        key = "" if changes["key"][row] < 0 else side["keys"][changes["key"][row]]
        values = (int(changes[name][row]) for name in ("status", "references", "tokens"))
        found[int(changes["block"][row])] = (*values, held, key)
    return found


def drawn(case: Any) -> dict[str, Any]:
    """Blocks after the last operation, on each side."""
    last = len(case["operations"].splitlines())
    return {side["name"]: cells_of(side, last) for side in case["sides"]}
