"""Questions asked in forked processes: one that crashes, hangs or leaves something behind costs its own answer alone.

Model classes leave things behind: vLLM's generic backend sets `VLLM_MLA_DISABLE` for a model whose latent attention it
cannot serve, and every later DeepSeek would be built without. A child begins where the process stood after its imports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@dataclasses.dataclass
class Child:
    """A process at work on a question.

    Attributes:
      key: the question's.
      process: its number.
      output: what its answer is read from.
      deadline: time on the monotonic clock at which it is ended.
      text: what was read so far.
    """

    key: str
    process: int
    output: int
    deadline: float
    text: bytes = b""


def answers(
    questions: Iterable[tuple[str, Callable[[], Any]]], *, jobs: int, seconds: float
) -> Iterator[tuple[str, Any]]:
    """Each question's key and its answer, as they come; `{"refused": reason}` for a child that ended without one.

    Args:
      questions: keys and what to call; the result has to be JSON.
      jobs: children at once.
      seconds: that one may take.
    """
    waiting, running = iter(questions), list[Child]()
    with selectors.DefaultSelector() as selector:
        while True:
            while len(running) < jobs and (question := next(waiting, None)) is not None:
                child = start(*question, seconds)
                running.append(child)
                selector.register(child.output, selectors.EVENT_READ, child)
            if not running:
                return
            for event, _ in selector.select(min(child.deadline for child in running) - time.monotonic()):
                child = event.data
                part = os.read(child.output, 1 << 16)
                child.text += part
                if not part:
                    child.deadline = 0.0  # it is done; the time limit below takes it up
            for child in [each for each in running if each.deadline <= time.monotonic()]:
                selector.unregister(child.output)
                running.remove(child)
                yield child.key, finish(child, seconds)


def start(key: str, question: Callable[[], Any], seconds: float) -> Child:
    """A child that answers; it prints nothing else."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        status = 1
        try:
            with os.fdopen(writing, "w", encoding="utf-8") as output:
                json.dump(question(), output)
            status = 0
        finally:
            os._exit(status)  # whatever was raised: nothing of the parent's may run here
    os.close(writing)
    return Child(key, process, reading, time.monotonic() + seconds)


def finish(child: Child, seconds: float) -> Any:
    """The child's answer; ends it if it has not given one."""
    hung = child.deadline > 0
    if hung:
        os.kill(child.process, signal.SIGKILL)
    os.close(child.output)
    _, status = os.waitpid(child.process, 0)
    try:
        return json.loads(child.text)
    except ValueError:
        code = os.waitstatus_to_exitcode(status)
        return {"refused": f"process: no answer within {seconds:.0f} s" if hung else f"process: ended with {code}"}
