"""Several requests of one text in one step, of which the first ignore the cache: hits inside unwritten blocks."""

from __future__ import annotations

from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Hit
from tests.suites.history import HistorySuite
from tests.suites.tails import Tails, beginning
from tests.suites.watched import WATCHED


class Siblings(Tails):
    """One request that leaves a state where its prompt ends, then several more of its text side by side.

    A request that wants its prompt's own probabilities computes all of it, whatever is cached. So blocks are filled
    beside cached ones of the same text, and whoever looks in the same step may be shown those.
    """

    def step(self) -> None:
        """One scheduling step: who runs ends or goes on, one request or several come, copies are done."""
        self._perform(oplog.StepOp())
        for request in list(self._running):
            if self._choices.chance(40):
                self._running.remove(request)
                self._perform(oplog.FreeOp(id=request.id))
            else:
                self._continue(request)
        alone = self._arrived == 0 or self._choices.chance(30)
        for place in range(1 if alone else self._choices.integer(2, 3)):
            self._come(alone, heeds=alone or self._choices.chance(80 if place else 20))
        self._perform(oplog.CopiesOp())
        self._perform(oplog.EventsOp())

    def _come(self, alone: bool, heeds: bool) -> None:
        self._arrive()
        request = self._waiting.pop()
        found = self._perform(oplog.LookupOp(id=request.id))
        assert isinstance(found, Hit)
        hit = found.hit if heeds else 0
        end = (request.length - 1) // self._unit * self._unit
        new = end - hit if alone and end > hit else self._chunk(request, hit)
        if self._allocate(request, new, hit, 0):
            self._running.append(request)
        else:
            self._perform(oplog.DropOp(id=request.id))


SUITE = HistorySuite(
    "siblings",
    "the reference manager when several requests of one text come in one step, some of which ignore the cache",
    ("partial",),
    WATCHED,
    beginning(Siblings, steps=5, blocks=(40, 90)),
    pace=4,
)
