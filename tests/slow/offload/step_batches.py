"""Operations on a connector as a batch: noted while a scheduler drives it, to be performed again at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload import numpy
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.connector import Connector, Offloading, configured
from hkv.dialects.vllm.offload.plain import empty
from hkv.oracle.record import Only, record
from reference.dialects.vllm.offload import scheduler
from reference.dialects.vllm.offload.connector import perform_any
from reference.dialects.vllm.offload.records import LISTS, Code, Tier

SIZES = {"requests": 60, "operations": 1_500, "results": 1_500, "rows": 1_000, "given": 9_000, "hashed": 9_000}
SIZES |= {"handing": 300, "jobs": 200, "fence_records": 400, "named": 3_000, "keys": 2_400, "payload": 400, "room": 256}
SIZES |= dict.fromkeys(("flushed", "stores", "fresh", "handed", "fences"), 800)
SIZES |= {"requests.chain": 64, "requests.uses": 192, "requests.blocks": 192, "named.blocks": 2}
SIZES |= dict.fromkeys(("groups", "order", "jobs.sizes", "jobs.starts", "rows.counts"), 3)
SIZES |= {f"requests.{name}": 3 for name in ("held", "before", "cursors", "reach")}
"""Sizes of every batch, so that one program performs them all."""

FLAGS = ("told", "whole", "tokens", "finished", "preempted")


@dataclasses.dataclass
class Told:
    """An operation, and all that it reads: rows, states that are handed over, blocks that are copied to."""

    code: Code
    state: Offloading | None
    given: dict[str, Any]
    rows: list[tuple[Offloading, list[int], dict[str, int], list[int], list[int]]]
    handed: list[tuple[Offloading, int, int, int]]
    targets: list[int]


class Noted(Connector):
    """A connector, with a note of each operation."""

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__(config)
        self.noted: list[Told] = []

    def _do(self, code: Code, state: Offloading | None, **given: Any) -> int:
        tier, told = self.tier, Told(code, state, dict(given), [], [], [])
        for row in tier.rows[1 : 1 + given.get("count", int(code == Code.ALLOCATED))]:
            end = row.start + sum(row.counts)
            blocks, hashed = (each[row.start : end] for each in (tier.given, tier.hashed))
            flags = {name: getattr(row, name) for name in FLAGS}
            told.rows.append((self._states[row.request], list(row.counts), flags, blocks, hashed))
        for each in tier.handing[1 : 1 + given.get("handed", 0)]:
            told.handed.append((self._states[each.request], each.group.index, each.block, each.tokens))
        start = given.get("targets_start", 0)
        told.targets = tier.given[start : start + given.get("targets", 0)]
        if code == Code.REPORT:
            told.given["job"] = given["job"].number
        self.noted.append(told)
        return super()._do(code, state, **given)

    def batch(self, jobs: list[int]) -> Tier:
        """An empty tier with all operations that were noted; reports are about these records of jobs, if any."""
        config = self.config
        made = empty(config.num_chunks, config.policy, config.threshold, config.tracked, tells=False, **SIZES)
        tier = configured(made, config)
        names, groups, spare = list(self._prefixes), len(config.chunk_tokens), iter(tier.named[1:])
        tier.known, tier.last = LISTS + len(names) * groups, SIZES["requests"]
        for at, key in enumerate(tier.keys[LISTS + 1 : tier.known + 1]):
            key.group = at % groups
        for row in tier.requests[1:]:
            row.ends = next(spare)
        for use in spare:
            use.next, tier.vacant = tier.vacant, use
        for job in tier.jobs[1:]:
            job.after, tier.idle_job = tier.idle_job, job
        for fence in tier.fence_records[1:]:
            fence.next, tier.idle_fence = tier.idle_fence, fence
        rows: dict[Offloading, int] = {}
        place, row_at, handed_at, reports = 0, 1, 1, iter(jobs)
        for op, told in zip(tier.operations[1:], self.noted, strict=False):
            for name, value in told.given.items():
                if name != "job":
                    setattr(op, name, value)
            op.code, op.start, op.handed_start = told.code, row_at, handed_at
            if told.code == Code.REPORT and jobs:
                op.job = tier.jobs[next(reports)]
            if told.state is not None:
                op.request = rows.setdefault(told.state, len(rows) + 1)
                chain = [self._prefixes[key] for key in told.state.request.keys if key in self._prefixes]
                tier.requests[op.request].chain[: len(chain)] = chain
            for owner, counts, flags, blocks, hashed in told.rows:
                row = tier.rows[row_at]
                row.request, row.start, row_at = tier.requests[rows[owner]], place, row_at + 1
                row.counts[: len(counts)] = counts
                for name, value in flags.items():
                    setattr(row, name, value)
                end = place + len(blocks)
                tier.given[place:end], tier.hashed[place:end], place = blocks, hashed, end
            for owner, group, block, tokens in told.handed:
                each, handed_at = tier.handing[handed_at], handed_at + 1
                each.request, each.group = tier.requests[rows[owner]], tier.groups[group + 1]
                each.block, each.tokens = block, tokens
            op.targets_start = place
            tier.given[place : place + len(told.targets)] = told.targets
            place += len(told.targets)
        return tier

    def performed(self) -> tuple[Tier, list[int]]:
        """A batch that was performed, one operation after the other, and the records of jobs that reports are about."""
        tier, jobs, numbers = self.batch([]), list[int](), dict[int, int]()
        for op, result, told in zip(tier.operations[1:], tier.results[1:], self.noted, strict=False):
            if told.code == Code.REPORT:
                jobs.append(numbers[told.given["job"]])
                op.job = tier.jobs[jobs[-1]]
            perform_any(tier, op, tier.requests[op.request], result, told.code)
            for at, job in enumerate(tier.jobs[1:], 1):
                if job.owner is not None:
                    numbers[job.number] = at
        return tier, jobs


def driven(feature: str, seed: int, changes: Mapping[str, Any]) -> Noted:
    """A connector that random traffic of a scheduler has driven."""
    found: list[Any] = []

    def made(header: structs.Header) -> Any:
        found.append(numpy.engine(msgspec.structs.replace(header, **changes)))
        return found[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler, "Connector", Noted)
        record(made, feature, seed, 2, 10, Only(dialect=structs.OFFLOAD))
    noted = found[0].scheduler.connector
    assert isinstance(noted, Noted)
    return noted
