"""A page in one file: plain modules of JavaScript, a style sheet and packed data, which a browser opens from a disk.

Nothing is built: the modules of this folder are written into the page one after the other, so that what is installed
is what one reads. The page asks nobody for anything, and its content security policy says so: scripts and styles are
those whose digests it names, and nothing else is loaded. Data are JSON beside raw columns of numbers, deflated; the
browser inflates them itself. Text of logs enters the page as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import pathlib
import re
import zlib
from typing import Any

import msgspec
import numpy as np

MODULES = ("data", "rows", "paint", "view", "panel", "charts", "replay", "main")
"""Modules of the page, each after those that it uses."""

LONG_TEXT = 2_000
"""Characters from which a text is packed beside the JSON, so that only the lines that are shown are decoded."""

_FOLDER = pathlib.Path(__file__).parent


def page(title: str, data: dict[str, Any], live: str = "") -> bytes:
    """The whole page.

    Args:
      title: title of the window.
      data: plain values and NumPy columns of integers.
      live: address that a live page asks for new data, on the server that it came from; "" for none.
    """
    script, style = (_source(name) for name in ("js", "css"))
    policy = f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'"
    policy += "; connect-src 'self'" if live else ""
    body = (_FOLDER / "page.html").read_text(encoding="utf-8")
    filled = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": style, "LIVE": html.escape(live)}
    filled |= {"SCRIPT": script, "DATA": base64.b64encode(packed(data)).decode()}
    return re.sub("@([A-Z]+)@", lambda found: filled[found[1]], body).encode()


def packed(data: dict[str, Any]) -> bytes:
    """Data of a page: length of the JSON, the JSON, and the columns and texts that it refers to, deflated."""
    parts: list[bytes] = []
    size = 0

    def refer(kind: str, content: bytes, count: int) -> dict[str, Any]:
        nonlocal size
        padding = -len(content) % 8
        parts.append(content + bytes(padding))
        size += len(content) + padding
        return {"$": [kind, size - len(content) - padding, count]}

    def walk(value: Any) -> Any:
        match value:
            case np.ndarray():
                return refer(*_column(value), len(value))
            case str() if len(value) > LONG_TEXT:
                content = value.encode("utf-8", "surrogatepass")
                return refer("text", content, len(content))
            case dict():
                return {name: walk(each) for name, each in value.items()}
            case list() | tuple():
                return [walk(each) for each in value]
            case _:
                return value

    head = msgspec.json.encode(walk(data))
    head += b" " * (-(len(head) + 4) % 8)
    return zlib.compress(len(head).to_bytes(4, "little") + head + b"".join(parts), 9)


INTEGERS = ("uint8", "int8", "uint16", "int16", "int32")
"""Kinds of columns of integers, from narrow to wide; `data.js` knows each."""


def _column(values: np.ndarray) -> tuple[str, bytes]:
    """Kind and bytes of a column: the narrowest integers that hold it, or its differences where it never falls.

    Beyond int32 they are float64, which every integer below 2^53 is, as numbers are in JavaScript.
    """
    values = values.astype(np.int64)
    steps = np.diff(values, prepend=0)
    delta = len(values) > 1 and values[0] >= 0 and (steps >= 0).all() and values[-1] < 1 << 31
    values = steps if delta else values
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    fits = (name for name in INTEGERS if np.iinfo(name).min <= low and high <= np.iinfo(name).max)
    kind = next(fits, "float64")
    return f"{kind}+" if delta else kind, values.astype(kind).tobytes()


def _source(kind: str) -> str:
    if kind == "css":
        return (_FOLDER / "page.css").read_text(encoding="utf-8")
    modules = "\n".join((_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in MODULES)
    return f'"use strict";\n(() => {{\n{modules}}})();\n'


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
