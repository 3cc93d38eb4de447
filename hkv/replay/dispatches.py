"""A trace as arrays, a dialect's program, its dispatches over the trace, and what they leave as records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hkv.errors import ConfigError, EngineFailure
from hkv.machine.kept_programs import KeptProgram
from hkv.replay.observed import Boundaries, MissReason
from hkv.replay.schedule import (
    FINISHED,
    NEVER_FITS,
    TOO_LONG,
    Arrival,
    Recorder,
    RequestRecord,
    Schedule,
    SharedArrivals,
    StepRecords,
)
from hkv.replay.schedule_state import ARRIVING, RESULT_COLUMNS, Arriving, Ending, Machine, Mode, Number, RequestResult
from hkv.state.key_table import eviction_of
from hkv.state.status import Status

LATEST = 1 << 29
"""Steps that a replay may count to."""

STEPS = 4096
"""Steps of one dispatch."""

TELLING = 1024
"""Steps of a dispatch of a replay that another one waits for."""

OUTCOMES = {Ending.NONE: "", Ending.FINISHED: FINISHED, Ending.NEVER_FITS: NEVER_FITS, Ending.TOO_LONG: TOO_LONG}

RECORDED = {
    each.name.lower(): each for each in RequestResult if each not in (RequestResult.OUTCOME, RequestResult.TOKENS)
}
"""Columns of a result that are fields of a `RequestRecord`, by name."""


@dataclasses.dataclass(frozen=True)
class Incoming:
    """A trace as arrays.

    Attributes:
      requests: int32[n + 1, 5], `hkv.replay.schedule_state.Trace.requests`.
      keys: int32[m], as in `Trace.keys`.
      ends: int64[n + 1], where each request's keys begin, and where the last ones end.
      num_keys: distinct prefix keys: all keys are below it.
      seen: int64[n], `Arrival.seen` of each request, or one number for all.
    """

    requests: np.ndarray
    keys: np.ndarray
    ends: np.ndarray
    num_keys: int
    seen: np.ndarray | int = 0

    @property
    def count(self) -> int:
        """Requests of the trace."""
        return len(self.requests) - 1

    def longest(self, limit: int) -> int:
        """Most tokens of a request that has at most `limit`, its output included; at least 1."""
        lengths = self.requests[:-1, 1:3].astype(np.int64).sum(axis=1)
        return int(lengths[lengths <= limit].max(initial=1))

    def payload(self, room: int) -> jax.Array:
        """`keys` with room for so many, on the device: replays read it, and share it."""
        if room not in self._payloads:
            padded = np.zeros(room, np.int32)
            padded[: len(self.keys)] = self.keys
            self._payloads[room] = jax.device_put(padded)
        return self._payloads[room]

    @functools.cached_property
    def _payloads(self) -> dict[int, jax.Array]:
        return {}

    def slots(self, most: int) -> int:
        """Request slots for at most so many running requests and the head of the queue."""
        return min(most, max(1, self.count)) + 1

    def keys_of(self, index: int) -> Callable[[], list[int]]:
        """Makes one request's keys when called; none for a request that was too long."""
        start, end = self.ends[index], self.ends[index + 1]
        return lambda: self.keys[start:end].tolist()


def incoming(arrivals: Sequence[Arrival], max_model_len: int) -> Incoming:
    """A trace as arrays; its keys are made here, in the order of the trace, for requests that are not too long.

    Arrays of arrivals that several replays share are made once.
    """
    if not isinstance(arrivals, SharedArrivals):
        return _incoming(arrivals, max_model_len)
    if arrivals.prepared is None:
        arrivals.prepared = _incoming(arrivals, max_model_len)
    return arrivals.prepared


def _incoming(arrivals: Sequence[Arrival], max_model_len: int) -> Incoming:
    late = next((each.step for each in arrivals if each.step >= LATEST), None)
    if late is not None:
        raise ConfigError("step", late, f"arrivals before step {LATEST}: a longer --step-ms")
    parts = [np.asarray(each.keys() if each.prompt + each.output <= max_model_len else ()) for each in arrivals]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    keys = np.concatenate([np.zeros(0, np.int32), *(part for part in parts if len(part))]).astype(np.int32, copy=False)
    requests = np.zeros((len(arrivals) + 1, ARRIVING), np.int32)
    for column, name in ((Arriving.STEP, "step"), (Arriving.PROMPT, "prompt"), (Arriving.OUTPUT, "output")):
        requests[:-1, column] = [getattr(each, name) for each in arrivals]
    requests[:-1, Arriving.KEY_START] = ends[:-1]
    requests[:-1, Arriving.ASKED] = [each.asked for each in arrivals]
    seen = np.array([arrival.seen for arrival in arrivals], np.int64)
    return Incoming(requests, keys, ends, int(keys.max(initial=-1)) + 1, seen)


def trace_arrays(
    schedule: Schedule, trace: Incoming, requests: int, keys: int, **more: int
) -> tuple[np.ndarray, jax.Array, np.ndarray]:
    """The fields of a `hkv.replay.schedule_state.Trace`, the keys on the device, the others as NumPy arrays."""
    values = {**dataclasses.asdict(schedule), "requests": trace.count, **more}
    numbers = np.zeros(len(Number), np.int32)
    for name, value in values.items():
        numbers[Number[name.upper()]] = min(int(value), LATEST)
    table = np.zeros((requests + 1, ARRIVING), np.int32)
    table[: trace.count] = trace.requests[: trace.count]
    return table, trace.payload(keys), numbers


def rounded(size: int, least: int) -> int:
    """The smallest `least * 2**k` that is at least `size`."""
    while least < size:
        least *= 2
    return least


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes: the cache's buckets, requests of the trace, and their keys."""

    buckets: Any
    requests: int
    keys: int


def programs(dispatch: Callable[..., Any], name: str) -> Callable[..., KeptProgram]:
    """Programs `(parameters, trace, resident) -> (resident, ids, number of ids)` by the room for ids, 0 unless given.

    The resident is donated. Without room no ids are reported, and nothing is compiled for them.
    """

    @functools.cache
    def program(ids: int = 0) -> KeptProgram:
        function = functools.partial(dispatch, room=ids)
        return KeptProgram(function, (2,), f"{name}-{ids}", lambda parameters, trace, resident: (resident, 0, 0))

    return program


class Dispatches:
    """A compiled schedule on its way through a trace; `room` for the ids that a dispatch reports, 0 for none.

    Attributes:
      ids: ids that were reported, in order, dispatch after dispatch.
    """

    def __init__(
        self, program: KeptProgram, trace: Incoming, groups: int, room: int, parameters: Any, inputs: Any, resident: Any
    ) -> None:
        self._program, self._trace, self._groups, self._room = program, trace, groups, room
        self._parameters, self._inputs, self._resident = jax.device_put((parameters, inputs, resident))
        self._samples: list[np.ndarray] = []
        self.ids: list[np.ndarray] = []

    def dispatch(self) -> Machine:
        """Replays up to so many steps more. Returns where the schedule stands, as NumPy integers."""
        self._resident, ids, count = self._program(self._parameters, self._inputs, self._resident)
        machine = Machine(*np.asarray(self._resident.machine))
        if machine.mode == Mode.FAILED:
            status = Status(int(machine.status)).name
            raise EngineFailure("operation", status, f"one that the schedule may perform in step {machine.step}")
        if machine.samples:
            self._samples.append(np.array(self._resident.samples[: int(machine.samples)]))
        if self._room:
            if int(count) > self._room:
                raise ConfigError("ids", self._room, f"room for the {int(count)} ids of one step")
            self.ids.append(np.array(ids[: int(count)]))
        return machine

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
        ended = step = 0
        if tells is not None:
            self._change(STEPS=TELLING)
        while True:
            if asks is not None:
                self._wait(asks, step)
            machine = self.dispatch()
            step = int(machine.step)
            if tells is not None:
                tells.tell(self.request_results[:, RequestResult.HIT], int(machine.taken))
            for _ in range(ended, int(machine.ended)):
                progress()
            ended = int(machine.ended)
            if machine.mode == Mode.DONE:
                return int(machine.step)

    def _wait(self, asks: Boundaries[Any], step: int) -> None:
        """Waits for hits of requests that a step may admit; the next dispatch ends before others are needed."""
        steps, count = self._trace.requests[:, Arriving.STEP], self._trace.count
        known = asks.known(lambda number: number == count or bool(steps[number] > step))
        requests = np.array(self._inputs.requests)
        requests[:known, Arriving.ASKED] = asks.hits[:known]
        self._inputs = dataclasses.replace(self._inputs, requests=jax.device_put(requests))
        self._change(UNTIL=int(steps[known]) if known < count else 0)

    def _change(self, **values: int) -> None:
        """Replaces numbers of the next dispatches, by the names of `Number`."""
        numbers = np.array(self._inputs.numbers)
        for name, value in values.items():
            numbers[Number[name]] = value
        self._inputs = dataclasses.replace(self._inputs, numbers=jax.device_put(numbers))

    @property
    def resident(self) -> Any:
        """Arrays that are on the device now."""
        return self._resident

    @property
    def request_results(self) -> np.ndarray:
        """int32[requests, 8 + groups]: `RequestResult` of each request of the trace, and why its hit ended."""
        return np.asarray(self._resident.request_results)[: self._trace.count, : RESULT_COLUMNS + self._groups]

    def _miss_reasons(self, reasons: Sequence[str]) -> list[tuple[int, tuple[MissReason, ...]]]:
        """Of each request, up to where its blocks were computed, and what each group lacked there."""
        results = np.asarray(self._resident.request_results)[: self._trace.count]
        width = (results.shape[1] - RESULT_COLUMNS - 1) // 2
        told: list[list[int]] = results[:, RESULT_COLUMNS : RESULT_COLUMNS + self._groups].tolist()
        past: list[list[int]] = results[:, RESULT_COLUMNS + width :].tolist()
        found: list[tuple[int, tuple[MissReason, ...]]] = []
        for codes, (computed, *values) in zip(told, past, strict=True):
            pairs = zip(codes, values, strict=False)
            found.append(
                (computed, tuple(MissReason(reasons[code], *eviction_of(each, width)) for code, each in pairs))
            )
        return found

    def _record(self, recorder: Recorder, reasons: Sequence[str]) -> None:
        """Fills a recorder with everything that happened, as the plain schedule's observer would have recorded it."""
        results = self.request_results
        seen, miss_reasons = (
            np.broadcast_to(self._trace.seen, len(results)),
            self._miss_reasons(reasons) if reasons else (),
        )
        for index, (row, result) in enumerate(zip(self._trace.requests.tolist(), results.tolist(), strict=False)):
            recorder.requests[index] = RequestRecord(
                index=index,
                prompt=row[1],
                output=row[2],
                arrived=row[0],
                outcome=OUTCOMES[Ending(result[RequestResult.OUTCOME])],
                seen=int(seen[index]),
                **{name: result[place] for name, place in RECORDED.items()},
            )
            if reasons and result[RequestResult.ADMITTED] >= 0:
                recorder.requests[index].computed, recorder.requests[index].miss_reasons = miss_reasons[index]
        columns = [part.T for part in self._samples]
        names = [field.name for field in dataclasses.fields(StepRecords)]
        if columns:
            values = np.concatenate(columns, axis=1).tolist()
            recorder.steps = StepRecords(**dict(zip(names, values, strict=True)))
