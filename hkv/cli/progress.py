"""Progress on stderr: a bar where that is a terminal, a line every twenty seconds where it is a file or a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click
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
    """Shows what a search says of itself; the yielded function takes a text, and the share of a level that is done."""
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


# Ctrl-C: the command reports what it found so far, and the process is gone within two seconds, whatever it computes.

INTERRUPTED = 130
"""Exit status of an interrupted command: 128 and the number of SIGINT, as shells have it."""

PATIENCE = 0.8
"""Seconds after which the main thread is taken to be inside a native call, where no exception can reach it."""

UNWINDING = 0.7
"""Seconds more that it has where the exception did reach it: it may be writing what it found."""

LAST_WORDS = 0.4
"""Seconds that last words may take if the main thread did not say them; then the process ends."""


class Interruption:
    """An interrupt of one run of a command.

    Python raises KeyboardInterrupt in the main thread, and only between two steps of the interpreter: XLA compiling or
    computing on that thread puts it off. So a thread of its own hears of the signal through the wakeup descriptor.
    When the main thread has not come back in time, that thread says the last words in its stead, and ends the process.

    An interrupted process must not shut down as usual either. jaxlib compiles on threads of its own, and a wait for
    one that is interrupted leaves it running; at exit JAX destroys its client and its devices, and the compilation,
    when it comes to use them, reads freed memory (a segmentation fault with jaxlib 0.10.2). There is no way to join or
    to stop it, so `leave` ends the process at once.
    """

    def __init__(self, attended: bool = True) -> None:
        self.requested = False
        """True once an interrupt came. It need not arrive as one: the import of an extension turns it into an error."""
        self._attended = attended
        self._words: list[Callable[[], None]] = []
        self._reporting = threading.Lock()
        self._over = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Listens for SIGINT. To be entered on the main thread; without effect where SIGINT is ignored, as by nohup."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._interrupt)
        usual, sys.unraisablehook = sys.unraisablehook, _unraised
        threading.Thread(target=self._watch, args=(reader,), name="hkv-interruption", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()
            signal.set_wakeup_fd(before)
            sys.unraisablehook = usual
            if not self.requested:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(writer)

    def _interrupt(self, number: int, frame: object) -> None:
        del number, frame
        self._over.clear()
        self.requested = True
        raise KeyboardInterrupt

    def _watch(self, reader: int) -> None:
        while heard := os.read(reader, 1):
            if heard[0] != signal.SIGINT:
                continue
            if self._over.wait(PATIENCE) or (self.requested and self._over.wait(UNWINDING)):
                continue
            threading.Thread(target=self.report, daemon=True).start()
            if not self._over.wait(LAST_WORDS):
                self.leave()
        os.close(reader)

    def accept(self) -> None:
        """Takes an interrupt as the usual end of what the command waited for: it goes on, and ends by itself."""
        self.requested = False
        self._over.set()

    def report(self) -> None:
        """Prints the last words, once; a second caller waits for the process to end."""
        if not self._reporting.acquire(blocking=False):
            threading.Event().wait()
        if signal.getsignal(signal.SIGINT) == self._interrupt and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # they are said once, however impatient the user is
        with contextlib.suppress(Exception):
            for words in reversed(self._words):
                words()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                print("hkv: interrupted", file=sys.stderr, flush=True)
        if threading.current_thread() is not threading.main_thread():
            self.leave()

    def leave(self) -> None:
        """Ends the process without shutting the interpreter down."""
        os._exit(INTERRUPTED)

    @contextlib.contextmanager
    def saying(self, words: Callable[[], None]) -> Iterator[None]:
        """Has `words` said if an interrupt ends what is inside."""
        self._words.append(words)
        try:
            yield
        except BaseException as error:
            if not (self.requested or isinstance(error, KeyboardInterrupt)):
                self._words.remove(words)
            elif not self._attended:
                words()
            raise
        self._words.remove(words)


def _unraised(problem: Any) -> None:
    """Says nothing of an interrupt that came within a callback, as of JAX's to the garbage collector: it was heard."""
    if not isinstance(problem.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(problem)


def interruption() -> Interruption:
    """The interruption of the command that runs; one that nobody watches where it was not started by `hkv.cli.main`."""
    context = click.get_current_context(silent=True)
    found = context.find_object(Interruption) if context is not None else None
    return found or Interruption(attended=False)
