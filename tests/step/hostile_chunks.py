"""Requests that arrive, are computed in chunks of any size, are refused, preempted, and come again, in any order."""

from __future__ import annotations

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from hkv.state.status import Status
from tests.step.paged_model import P, R, Served, T

LENGTH = P + 4
"""Tokens of the longest request."""

DRAFTS = 2

NOTHING, BEGIN, RESUME, ALL_AT_ONCE = 0, 1, 2, 3
"""Events of an empty row."""


class Drive:
    """Rows, and the requests in them and waiting for them; every request is the beginning of one of two texts.

    `alone` serves rows one by one, too (`hkv.allocate`, which is one more program to compile). Rows are their text and
    the length of their prompt; `preempted` have the number of known tokens besides; `last` chunks may not have come
    back yet.
    """

    def __init__(self, served: Served, data: st.DataObject, alone: bool) -> None:
        self.served, self.draw, self.single = served, data.draw, alone
        text = self.draw(st.lists(st.integers(0, 2), min_size=LENGTH, max_size=LENGTH))
        branch = self.draw(st.integers(0, LENGTH))
        self.texts = [text, [*text[:branch], *((token + 1) % 3 for token in text[branch:])]]
        self.rows: list[tuple[int, int]] = [(0, 0)] * R
        self.preempted: list[tuple[int, int, int]] = []
        self.last = [0] * R

    def run(self) -> None:
        for _ in range(self.draw(st.integers(4, 14))):
            for row in range(R):
                if self.served.running(row):
                    self.end(row)
                else:
                    self.begin(row)
            self.step()
        for sight in sorted(self.served.seen):
            event(sight)

    def begin(self, row: int) -> None:
        kind = self.draw(st.sampled_from((NOTHING, BEGIN, BEGIN, RESUME, ALL_AT_ONCE)))
        if kind == NOTHING:
            return
        if kind == RESUME and self.preempted:
            text, prompt, known = self.preempted.pop(self.draw(st.integers(0, len(self.preempted) - 1)))
            self.rows[row] = text, prompt
            self.served.arrive(row, self.texts[text][:known], prompt)
            self.served.seen.add("a request that was preempted")
            return
        text, prompt = self.draw(st.integers(0, 1)), self.draw(st.integers(1, P))
        self.rows[row] = text, prompt
        if kind == ALL_AT_ONCE and self.single:
            self.served.allocate(row, self.texts[text][: min(prompt, T)], begins=True)
        else:
            self.served.arrive(row, self.texts[text][:prompt])

    def end(self, row: int) -> None:
        """Of some rows; those that are preempted come again with all that they computed, or their prompts."""
        kind = self.draw(st.integers(0, 7))
        if kind > 1:
            return
        if kind == 1:
            text, prompt = self.rows[row]
            self.preempted.append((text, prompt, min(P, max(prompt, len(self.served.tokens[row])))))
        self.served.free(row)

    def step(self) -> None:
        allowed = np.asarray(self.served.cache.allowed).tolist()
        sizes = [self.size(row, allowed[row]) for row in range(R)]
        texts = [self.texts[self.rows[row][0]] for row in range(R)]
        done = [len(tokens) for tokens in self.served.tokens]
        new = [texts[row][done[row] : done[row] + sizes[row]] for row in range(R)]
        if self.single and self.draw(st.integers(0, 9)) == 0:
            self.alone(new, allowed)
            return
        drafts = [self.draw(st.sampled_from(((), (), (1,), (0, 2)))) for _ in range(R)]
        in_flight = [min(self.draw(st.sampled_from((0, 0, 1, last))), done[row]) for row, last in enumerate(self.last)]
        status = self.served.step(new, drafts, in_flight, self.draw(st.permutations(range(R))))
        for row in range(R):
            require_status(status[row], len(new[row]), allowed[row])
            if new[row] and status[row] == Status.OK:
                self.last[row] = len(new[row])

    def alone(self, new: list[list[int]], allowed: list[int]) -> None:
        """One row's next tokens."""
        row = self.draw(st.integers(0, R - 1))
        if new[row]:
            status = self.served.allocate(row, new[row], begins=False)
            require_status(status, len(new[row]), allowed[row])

    def size(self, row: int, allowed: int) -> int:
        """Tokens of a row's next chunk: any number; to where a state's block ends; to the prompt's end and about it."""
        if not self.served.running(row):
            return 0
        left = self.rows[row][1] - len(self.served.tokens[row])
        kind = self.draw(st.integers(0, 4))
        if kind < 2:
            return self.draw(st.integers(0, T - DRAFTS))
        if kind == 2:
            return min(allowed, T - DRAFTS)
        return min(max(left + self.draw(st.integers(-1, 1)), 0), allowed if kind == 3 else T, T - DRAFTS)


def require_status(status: int, count: int, allowed: int) -> None:
    """A chunk is refused for crossing a state where it does, and else only for lack of blocks."""
    crosses = count > allowed
    assert status in ((Status.CROSSES_STATE,) if crosses else (Status.OK, Status.NO_ROOM))


def drive(config, data: st.DataObject, model: type[Served] = Served, alone: bool = False) -> None:
    """Drives a cache of a configuration."""
    Drive(model(config), data, alone).run()
