"""A replay's text, compiled: its arrays, its dispatches over a trace, and what they leave as records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import jax
import numpy as np

from hkv.errors import EngineFailure
from hkv.lowering import State
from hkv.lowering.programs import Program
from hkv.replay.dispatches import STEPS, TELLING, Incoming, rounded
from hkv.replay.observed import Boundaries, MissReason
from hkv.replay.schedule import FINISHED, NEVER_FITS, TOO_LONG, Recorder, RequestRecord, Schedule, StepRecords
from hkv.replay.schedule_state import Arriving
from hkv.version import check_reference

check_reference()  # before the first import of it

from reference.language import Layout  # noqa: E402
from reference.replay import LAST_STEP, Outcome, Phase, run  # noqa: E402

OUTCOMES = {
    Outcome.NONE: "",
    Outcome.FINISHED: FINISHED,
    Outcome.NEVER_FITS: NEVER_FITS,
    Outcome.TOO_LONG: TOO_LONG,
}

RECORDED = ("hit", "admitted", "ended", "preemptions", "recomputed", "recovered")
"""Fields of a request of the text that are those of a `RequestRecord`."""


class LoweredReplay:
    """A trace, a cache and a schedule, replayed in as few dispatches as steps allow.

    Args:
      layout: of the dialect's `reference.replay.Replay`.
      begin: its rule that makes empty arrays a cache in which nothing is cached; `begins`: the rule's numbers.
      static: scalars that the programs know, by name; `data`: others that are not 0, and arrays.
      sizes: of tables and arrays that are not among `data`, `lives` among them.
      trace: the requests.
      schedule: the numbers that steer it.
    """

    def __init__(
        self,
        layout: Layout,
        begin: tuple[FunctionType, Sequence[int]],
        static: Mapping[str, int],
        data: Mapping[str, Any],
        sizes: Mapping[str, int],
        trace: Incoming,
        schedule: Schedule,
    ) -> None:
        self._trace, self._known = trace, tuple(sorted(static.items()))
        self._layout, self._samples = layout, list[np.ndarray]()
        sizes = {**sizes, "steps": STEPS, "lives": sizes["lives"] + 1, "arrivals": rounded(trace.count, 64)}
        arrays: dict[str, Any] = layout.blank(sizes, data.keys())
        arrays |= {name: np.asarray(value, np.int32) for name, value in data.items()}
        for name, value in dataclasses.asdict(schedule).items():
            arrays[f"numbers.{name}"] = np.int32(min(value, LAST_STEP))
        for column, name in (
            (Arriving.STEP, "step"),
            (Arriving.PROMPT, "prompt"),
            (Arriving.OUTPUT, "output"),
            (Arriving.KEY_START, "first_key"),
            (Arriving.ASKED, "asked"),
        ):
            arrays[f"arrivals.{name}"][1 : trace.count + 1] = trace.requests[: trace.count, column]
        arrays |= {"count": np.int32(trace.count), "most_steps": np.int32(STEPS), "until": np.int32(LAST_STEP)}
        arrays = {name: array for name, array in arrays.items() if name not in static}
        begun, numbers = begin
        state = jax.device_put(arrays)
        self._state: State = program(layout, begun, self._known)(state, *numbers, sizes["lives"] - 1)

    @property
    def resident(self) -> State:
        """Arrays that are on the device now."""
        return self._state

    def dispatch(self) -> None:
        """Replays up to so many steps more."""
        self._state |= {"recorded": np.int32(0)}
        self._state = program(self._layout, run, self._known)(self._state)
        if self.number("phase") == Phase.FAILED:
            expected = f"one that the schedule may perform in step {self.number('step')}"
            raise EngineFailure("operation", f"refused for request {self.number('live')}", expected)
        if recorded := self.number("recorded"):
            names = [field.name for field in dataclasses.fields(StepRecords)]
            self._samples.append(np.array([self._state[f"steps.{name}"][1 : recorded + 1] for name in names]))

    def run(
        self,
        progress: Callable[[], None] = lambda: None,
        tells: Boundaries[Any] | None = None,
        asks: Boundaries[Any] | None = None,
    ) -> int:
        """Replays the whole trace. Returns the number of the last step + 1.

        `tells` gets the hits as they become known, for another replay. With `asks`, hits of another replay, no step
        begins before they are known of all requests that have arrived by then.
        """
        ended = 0
        if tells is not None:
            self._state |= {"most_steps": np.int32(TELLING)}
        while True:
            if asks is not None:
                self._wait(asks)
            self.dispatch()
            if tells is not None:
                tells.tell(self.of_requests("hit"), self._admitted())
            for _ in range(ended, self.number("ended")):
                progress()
            ended = self.number("ended")
            if self.number("phase") == Phase.DONE:
                return self.number("step")

    def number(self, name: str) -> int:
        """A scalar."""
        return int(self._state[name])

    def of_requests(self, name: str) -> np.ndarray:
        """int32[requests]: a field of each request of the trace."""
        return np.asarray(self._state[f"arrivals.{name}"])[1 : self._trace.count + 1]

    def cache(self, layout: Layout) -> Any:
        """The cache, of which that is the layout, as plain objects."""
        held = {**dict(self._known), **jax.device_get(self._state)}
        return layout.restored({name: held[f"cache.{name}"] for name in (*layout.arrays, *layout.scalars)})

    def _admitted(self) -> int:
        """Requests at the beginning of the trace of which all were admitted, or ended."""
        arrived = self.number("arrived")
        waiting = (self.of_requests("admitted") < 0) & (self.of_requests("ended") < 0)
        return int(np.argmax(np.append(waiting[:arrived], True)))

    def _wait(self, asks: Boundaries[Any]) -> None:
        """Waits for hits of requests that a step may admit; the next dispatch ends before others are needed."""
        steps, count, now = self._trace.requests[:, Arriving.STEP], self._trace.count, self.number("step")
        known = asks.known(lambda number: number == count or bool(steps[number] > now))
        asked = np.array(self._state["arrivals.asked"])
        asked[1 : known + 1] = asks.hits[:known]
        until = int(steps[known]) if known < count else LAST_STEP
        self._state |= {"arrivals.asked": jax.device_put(asked), "until": np.int32(until)}

    def record(self, recorder: Recorder, reasons: Sequence[str] = (), groups: int = 0) -> None:
        """Fills a recorder with everything that happened, as the plain schedule's observer would have recorded it;
        `reasons` why hits of so many groups ended, by the dialect's numbers, none where nobody asked."""
        seen = np.broadcast_to(self._trace.seen, self._trace.count).tolist()
        fields = {name: self.of_requests(name).tolist() for name in RECORDED}
        outcomes = self.of_requests("outcome").tolist()
        for index, row in enumerate(self._trace.requests[: self._trace.count].tolist()):
            recorder.requests[index] = RequestRecord(
                index=index,
                prompt=row[Arriving.PROMPT],
                output=row[Arriving.OUTPUT],
                arrived=row[Arriving.STEP],
                outcome=OUTCOMES[Outcome(outcomes[index])],
                seen=seen[index],
                **{name: values[index] for name, values in fields.items()},
            )
        if self._samples:
            recorder.steps = StepRecords(*np.concatenate(self._samples, axis=1).tolist())
        if reasons:
            told = np.asarray(self._state["arrivals.reasons"]).reshape(len(self._state["arrivals.step"]), -1)
            computed = self.of_requests("computed").tolist()
            listed: list[list[int]] = told[1 : self._trace.count + 1, :groups].tolist()
            for index, codes in enumerate(listed):
                if recorder.requests[index].admitted >= 0:
                    recorder.requests[index].computed = computed[index]
                    recorder.requests[index].miss_reasons = tuple(MissReason(reasons[code]) for code in codes)


@functools.cache
def program(layout: Layout, rule: FunctionType, static: tuple[tuple[str, int], ...]) -> Program:
    """A rule of a replay's text, compiled once for all replays under the same settings."""
    return Program(layout, rule, dict(static))
