"""Things that a scheduler with a tier was asked, as a batch: noted while traffic asks it, to be performed at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload import numpy
from hkv.dialects.vllm.offload.scheduler import QUEUES, OffloadScheduler, Served
from hkv.dialects.vllm.offload.simple import SimpleScheduler
from hkv.dialects.vllm.plain import LAYOUT as CACHE
from reference.dialects.vllm.offload.lives import Ask, Live
from reference.dialects.vllm.offload.serving import perform_one
from reference.language import Layout

REQUESTS, JOBS = 24, 160
"""Requests of a batch at most, which all have records of their own, and jobs."""


class Noted:
    """A scheduler's note of each thing that it is asked; mixed into one."""

    def __init__(self, config: Any) -> None:
        self.noted: list[tuple[Ask, Served | None, int, int]] = []
        self.came: list[tuple[Served, int, int]] = []
        super().__init__(config)

    def _ask(self: Any, code: Ask, live: Live | None, first: int = 0, second: int = 0) -> int:
        served = None if live is None else self._served[live]
        if code == Ask.REQUEST:
            assert live is not None
            self.came.append((served, live.prompt, live.output))
        if code != Ask.REPORT:
            self.noted.append((code, served, first, second))
        return super()._ask(code, live, first, second)  # type: ignore[misc]

    def _take_reports(self: Any, reports: Mapping[int, int], received: Sequence[str]) -> None:
        known = dict(self.connector.jobs if isinstance(self, OffloadScheduler) else self.jobs)
        loads = [(Ask.LOADED, self.requests[id], 0, 0) for id in sorted(received)]
        told = [(Ask.REPORT, None, number, workers) for number, workers in reports.items() if number in known]
        noted = self.noted
        self.noted = []
        super()._take_reports(reports, received)  # type: ignore[misc]
        self.noted = [*noted, *loads, *told]


class NotedOffloading(Noted, OffloadScheduler):
    """A scheduler with vLLM's own offloading that notes what it is asked."""


class NotedSimple(Noted, SimpleScheduler):
    """A scheduler with the simpler tier that notes what it is asked."""


def driven(header: structs.Header, seed: int, steps: int) -> Any:
    """A scheduler that random traffic has driven."""
    engine = numpy.engine(header)
    kind = NotedSimple if isinstance(engine.scheduler, SimpleScheduler) else NotedOffloading
    engine.scheduler = kind(engine.scheduler.config)
    registry.dialect_of(structs.OFFLOAD).drive(header, RandomChoices(seed), engine.perform, steps)
    return engine.scheduler


def batch(noted: Any, jobs: Sequence[int]) -> tuple[Any, int]:
    """The state of a scheduler that is about to be asked all that was noted, reports about these records of jobs; how
    many things these are."""
    made: Any = (SimpleScheduler if isinstance(noted, SimpleScheduler) else OffloadScheduler)(noted.config)
    serving, layout = made.serving, made._layout
    while serving.cache.slots < REQUESTS:
        made._spare.clear()
        made._spare_live()
    made._hold(noted.config.cache.max_model_len + 8)
    lives = {served: live for (served, *_), live in zip(noted.came, serving.lives[QUEUES + 2 :], strict=False)}
    for rank, (_, live) in enumerate(sorted(lives.items(), key=lambda pair: pair[0].id)):
        live.rank = rank
    for served, prompt, output in noted.came:
        live = lives[served]
        live.prompt, live.output = prompt, output
        copy = made.requests[served.id] = made._served[live] = Served(served.id, live, served.all_keys)
        numbers = made._take(copy, noted.config.cache.max_model_len + 8)
        live.request.chain[: len(numbers)] = numbers
    for each in range(4):
        made._make_room([live for live in lives.values() for _ in range(1 + each)])
    if isinstance(made, OffloadScheduler):
        made.connector.make_room(list(made.connector.requests.values()) * 2, JOBS)
        serving.tier.config.tells = 0
    assert len(noted.came) < REQUESTS
    layout.grow(serving, "asked", len(noted.noted))
    reports = iter(jobs)
    for asked, (code, served, first, second) in zip(serving.asked[1:], noted.noted, strict=False):
        asked.code, asked.live, asked.first, asked.second = code, lives.get(served), first, second
        if code == Ask.REPORT and jobs:
            asked.first = next(reports)
    for cache in (serving.cache, *([] if isinstance(made, OffloadScheduler) else [serving.tier])):
        for table in ("news", "offers"):
            CACHE.grow(cache, table, 200 - len(getattr(cache, table)))
            setattr(cache, table, type(cache.copies)(getattr(cache, table)))
    return serving, len(noted.noted)


def performed(noted: Any) -> tuple[Any, list[int]]:
    """A batch that was performed, one thing after the other, and the records of jobs that its reports are about."""
    serving, _ = batch(noted, [])
    simple, jobs, numbers = isinstance(noted, SimpleScheduler), list[int](), dict[int, int]()
    for asked, (code, *_) in zip(serving.asked[1:], noted.noted, strict=False):
        if code == Ask.REPORT:
            asked.first = numbers[asked.first]
            jobs.append(asked.first)
        perform_one(serving, asked, code)
        for at, job in enumerate((serving.copies if simple else serving.tier.jobs)[1:], 1):
            if simple or job.owner is not None:
                numbers[job.number - simple] = at
    return serving, jobs


def padded(layout: Layout, state: Any, sizes: Mapping[str, int]) -> None:
    """Makes tables, lines and arrays as large as those of others."""
    for name, size in layout.sizes_of(state).items():
        owner, _, field = name.rpartition(".")
        holder, flat, lacking = state, layout.arrays.get(name), sizes[name] - size
        for part in owner.split(".") if owner else ():
            holder = getattr(holder, part)
        if lacking > 0 and flat is None:
            layout.grow(state, name, lacking)
        elif lacking > 0:
            assert flat is not None
            for each in holder[1:] if flat.line else (holder,):
                getattr(each, field).extend([0 if flat.held is int else None] * lacking)
