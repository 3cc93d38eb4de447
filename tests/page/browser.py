"""Chromium through Playwright: Debian's if it is installed, else the one that Playwright brings."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

READY = "body[data-ready=yes]"


def launched(play: Any) -> Any:
    """A browser without a window."""
    return play.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox", "--enable-precise-memory-info"]
    )


@contextlib.contextmanager
def opened(browser: Any, address: str | pathlib.Path, link: str = "", **settings: Any) -> Iterator[Any]:
    """A page of a file or a server, once it is drawn; it must neither complain nor ask anybody for anything."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    url = address if isinstance(address, str) else address.absolute().as_uri()
    page.goto(url + link)
    page.wait_for_selector(READY, timeout=20_000)
    try:
        yield page
    finally:
        context.close()
    assert said == []
    assert all(each.startswith(url) for each in asked), asked


def settled(page: Any) -> None:
    """Waits until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until(page: Any, expression: str, seconds: float = 20.0) -> None:
    """Waits for an expression to be true; the policy of pages forbids Playwright's own way."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def place(page: Any, at: int, row: int, side: int = 0) -> tuple[float, float]:
    """Place on the screen of the cell of a column and a row."""
    found = page.evaluate(
        """([at, row, side]) => {
        const { view } = window.hkv, box = view.figures[side].over.getBoundingClientRect();
        const { x, y, sx, sy } = view.frame;
        return [box.x + 58 + (at - x + 0.5) * sx, box.y + view.top + (row - y + 0.5) * sy];
    }""",
        [at, row, side],
    )
    return found[0], found[1]
