"""The state of vLLM's scheduler with a second tier: requests in queues, and what it asks the tier.

vLLM 0.33 `Scheduler`.
"""

from __future__ import annotations

import enum

from reference.dialects.vllm.offload.records import Mail
from reference.dialects.vllm.records import Block, Cache, Request
from reference.language import Column, Part, Record, Ring, Settings, Table, Text

TEXT = Text(__name__)


class Live(Record):
    """A request in the scheduler.

    Attributes:
      slot: its place among requests of the cache, from 0 on. request: as the cache knows it.
      rank: its place among all by their names. prompt: tokens with which it comes; output: tokens that it generates.
      present: whether it is there. runs: whether it was admitted, and neither preempted nor ended since.
      finished: whether it has finished; `ended`, since the last step.
      loading: whether a load of it goes on, or has ended and not been looked at. loaded: whether that has ended.
      preempted: whether it was preempted ever; `returned`, since the last step; `gone`, before that was done.
      prefilling: whether it is on the way to its last token, so that loads leave room for it.
      partway: whether its last step stopped before its last token.
      proposed: tokens that a draft proposed for its next step; `checked`: those that its step checks. padded: whether
      these stand for none, and only keep the step's shape.
      scheduled: tokens of this step.
      looked: its turn among those that this step looked up, 0 if it did not; with its hit on the GPU in whole scheduler
      blocks (`local`), the tier's answer (`external`), and whether the load takes longer than the step (`later`).
    """

    slot: int
    request: Request
    rank: int
    prompt: int
    output: int
    present: int
    runs: int
    finished: int
    ended: int
    loading: int
    loaded: int
    preempted: int
    returned: int
    gone: int
    prefilling: int
    partway: int
    proposed: int
    checked: int
    padded: int
    scheduled: int
    looked: int
    local: int
    external: int
    later: int


class Asked(Record):
    """Something asked of the scheduler: an `Ask`, of a request or of a job, with numbers.

    Attributes:
      live: of REQUEST, RECEIVED and ABORT. first, second: of REQUEST, tokens that may be loaded and stored, NOTHING for
      all; of RESET, whether running requests are preempted, and whether the tier is emptied; of REPORT, the job's
      record and workers. answer: of RESET, whether the GPU's cache is empty; of others, 0 or a `Failed`.
    """

    code: int
    live: Live
    first: int
    second: int
    answer: int


class Numbers(Settings):
    """Numbers that steer a scheduler.

    Attributes:
      step_tokens: tokens of a step. most_running: requests that run at a time. drafts: tokens that a draft proposes.
      drafted: blocks that a step with drafts may take of a request, its recurrent states aside. state: tokens of a
      block of recurrent states, 0 without them.
    """

    step_tokens: int
    most_running: int
    drafts: int
    drafted: int
    state: int


class Ask(enum.IntEnum):
    """Things that are asked of a scheduler."""

    END, REQUEST, SCHEDULE, SAMPLE, LOADED, REPORT, RECEIVED, ABORT, RESET = range(9)


class Failed(enum.IntEnum):
    """Way in which vLLM's engine fails: over a tail beyond a limit, or a block that a job reads twice."""

    NONE, TAIL, TWICE = range(3)


class Serving(Part):
    """Requests, the GPU's cache, and a tier behind it, which a subclass has.

    Attributes:
      queues: requests that run, in the order in which they were admitted, those that wait without blocks, and those
      that wait with blocks, which come first: behind `running`, `waiting` and `holding`. active: those that run.
      numbers_of: of a block, its number. lives_of: of a request of the cache, the scheduler's record.
      stuck: whether a running request was refused blocks in this step. prefills: whether one that was partway runs.
      looks: lookups of this step. failed: a `Failed`; `culprit`, the block or the length.
    """

    cache: Cache
    lives: Table[Live]
    asked: Table[Asked]
    queues: Ring[Live]
    running: Live
    waiting: Live
    holding: Live
    numbers: Numbers
    numbers_of: Column[Block, int]
    lives_of: Column[Request, Live]
    active: int
    last: int
    stuck: int
    prefills: int
    looks: int
    failed: int
    culprit: int

    # What the tier says.

    def mail(self) -> Mail:
        """Things that the tier is told of."""
        raise NotImplementedError

    def arrive(self, live: Live, load_limit: int, store_limit: int) -> None:
        """A request comes."""
        raise NotImplementedError

    def know(self, live: Live) -> None:
        """The tier learns the cache's numbers of a request."""
        raise NotImplementedError

    def match(self, live: Live, local: int) -> tuple[int, bool]:
        """Tokens beyond a request's hit on the GPU that can be loaded, NOTHING for: ask again later; whether the load
        takes longer than the step."""
        raise NotImplementedError

    def allocated(self, live: Live, external: int) -> None:
        """A request was given the blocks that the mail's last rows tell of; tokens are to be loaded into them."""
        raise NotImplementedError

    def finish(self, live: Live, aborted: int) -> None:
        """A request has finished; its blocks are about to be given back."""
        raise NotImplementedError

    def order(self) -> None:
        """A step is scheduled, of which the mail tells."""
        raise NotImplementedError

    def loaded(self, live: Live) -> None:
        """Workers have loaded what a request waits for."""
        raise NotImplementedError

    def report(self, job: int, workers: int) -> None:
        """Workers have finished their parts of a job."""
        raise NotImplementedError

    def empty(self) -> bool:
        """Empties the tier; True if that can be."""
        raise NotImplementedError
