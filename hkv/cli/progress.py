"""Progress on stderr: a bar where that is a terminal, a line every twenty seconds where it is a file or a pipe."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS = 20.0
"""Seconds between two lines, and before the first: what ends sooner prints none."""


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows a bar of `total` steps; the yielded function takes one."""
    done = 0
    with _shown(description, total, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as (update, say):

        def advance() -> None:
            nonlocal done
            done += 1
            update(completed=done)
            say(f"{description}: {done:,} of {total:,}")

        yield advance


@contextlib.contextmanager
def counting_bar(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Shows a bar that fills as a count sinks from `total`; the yielded function takes the count."""
    columns = (BarColumn(), TextColumn("{task.fields[left]} {task.fields[unit]}"))
    with _shown(description, total, *columns, left=total, unit=unit) as (update, say):

        def sink(left: int) -> None:
            update(completed=total - left, left=left)
            say(f"{description}: {left:,} {unit}")

        yield sink


@contextlib.contextmanager
def level_bar(description: str) -> Iterator[Callable[[str, float], None]]:
    """Shows what a search says of itself; the yielded function takes a text, and the share of its level that is done.

    Args:
      description: shown until then.
    """
    with _shown(description, None, BarColumn(), TaskProgressColumn(), TimeElapsedColumn()) as (update, say):

        def progress(text: str, share: float) -> None:
            update(description=text, total=1.0, completed=share)
            say(f"{text}: {share:.0%}")

        yield progress


@contextlib.contextmanager
def _shown(
    description: str, total: float | None, *columns: ProgressColumn, **fields: Any
) -> Iterator[tuple[Callable[..., None], Callable[[str], None]]]:
    """A bar, as a function that updates it, and one that takes the line to say where no bar is drawn."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(console, description) as say:
            yield lambda **changes: None, say
        return
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, **fields)
        yield lambda **changes: bar.update(task, **changes), lambda line: None


@contextlib.contextmanager
def _lines(console: Console, latest: str) -> Iterator[Callable[[str], None]]:
    """Prints the latest line now and then, from a thread of its own: a single step can take a minute to compile."""
    ended = threading.Event()

    def say(line: str) -> None:
        nonlocal latest
        latest = line

    def run() -> None:
        while not ended.wait(SECONDS):
            console.print(latest, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
