"""Boundaries that one replay makes known to another of the same trace while both go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

Found = TypeVar("Found")


class Boundaries(Generic[Found]):
    """Hits of a replay in a thread of its own, for another one that asks up to them why its hits ended.

    Requests are first admitted in the order of the trace, so that hits become known in that order, too. The thread
    ends with the process: an interrupt need not wait for it.

    Attributes:
      hits: int64[requests], tokens that were found for each; only those of known requests are final.
    """

    def __init__(self, requests: int) -> None:
        self.hits = np.zeros(requests, np.int64)
        self._known = 0
        self._news = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._found: Found | None = None

    def begin(self, work: Callable[[], Found]) -> None:
        """Begins the replay; `work` tells as it goes on, and returns what `found` returns."""

        def run() -> None:
            try:
                self._found = work()
            except BaseException as error:  # raised again where somebody waits
                self._error = error
            with self._news:
                self._ended = True
                self._news.notify_all()

        threading.Thread(target=run, name="hkv-boundaries", daemon=True).start()

    def tell(self, hits: np.ndarray, known: int) -> None:
        """The hits of the first `known` requests are final."""
        with self._news:
            self.hits[:known] = hits[:known]
            self._known = known
            self._news.notify_all()

    def known(self, enough: Callable[[int], bool]) -> int:
        """Number of known requests, once that is enough, or all there will be."""
        with self._news:
            self._news.wait_for(lambda: self._ended or enough(self._known))
            if self._error is not None:
                raise self._error
            return len(self.hits) if self._ended else self._known

    def found(self) -> Found:
        """The replay, once it ended."""
        self.known(lambda _: False)
        assert self._found is not None
        return self._found
