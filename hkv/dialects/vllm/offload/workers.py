"""Workers of a scheduler that is driven without any: which jobs go on, and what of them each step reports.

A load begins with the step that orders it, a store with the next one. Jobs that a step has to wait for, and loads
within it, are reported by its output; all others when the log says so, as late and in whatever order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class WorkerReport(NamedTuple):
    """A step's output as far as transfers go: of each job, the workers that report it; requests whose loads ended."""

    jobs: dict[int, int]
    received: list[str]


class Workers:
    """Jobs that go on.

    Attributes:
      left: of each, the reports that are still to come.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.left: dict[int, int] = {}
        self._loads: dict[int, str] = {}

    def report(
        self,
        loads: Iterable[tuple[int, str, bool]],
        stores: Iterable[int],
        flushed: Iterable[int],
        reports: Sequence[int],
        at_once: bool,
    ) -> WorkerReport:
        """The reports of one step.

        Args:
          loads: number, request, and whether it is within the step, of each load that it orders.
          stores: numbers of the stores that it orders.
          flushed: jobs that it waits for.
          reports: jobs that a worker has finished, once for each worker; those that do not go on are left out.
          at_once: whether loads that the step orders end with it.
        """
        begun = list(loads)
        wanted = list(reports)
        self.left.update(dict.fromkeys((*(job for job, _, _ in begun), *stores), self._count))
        self._loads.update({job: id for job, id, within in begun if not within})
        awaited = [*sorted(flushed), *(job for job, _, within in begun if within or at_once)]
        wanted += [job for job in awaited for _ in range(self._count)]
        jobs, received = dict[int, int](), []
        for job in wanted:
            if job not in self.left:
                continue
            jobs[job] = jobs.get(job, 0) + 1
            self.left[job] -= 1
            if not self.left[job]:
                del self.left[job]
                if job in self._loads:
                    received.append(self._loads.pop(job))
        return WorkerReport(jobs, received)
