"""Jobs: transfers that go on, and the blocks that they read behind the cache's back.

A block that a job still reads and that is handed out meanwhile has the job *flushed*: the worker finishes it before the
step. Of windows, which a request gives up while it runs, and of states, blocks are fenced from the beginning; of full
attention once the request has finished. vLLM 0.33 `TransferJobStatus`, `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.pool import transferred
from reference.dialects.vllm.offload.records import Job, Offloaded, Tier, Use
from reference.language import Text, clause

TEXT = Text(__name__)


def new_job(t: Tier, request: Offloaded, writes: bool) -> Job:
    """A job of a request, without chunks."""
    job = t.idle_job
    t.idle_job = job.after
    job.number, job.owner, job.left, job.writes = t.number, request, t.config.workers, writes
    job.ordered, job.early, job.flushed = t.step, 0, 0
    job.first, job.last = None, None  # type: ignore[assignment]
    for at in range(t.config.groups):
        job.sizes[at], job.starts[at] = 0, 0
    job.after, request.first = request.first, job
    t.number += 1
    return job


def add_chunk(job: Job, use: Use) -> None:
    """One more chunk of a job."""
    use.next = None  # type: ignore[assignment]
    if job.last is None:
        job.first = use
    else:
        job.last.next = use
    job.last = use


def hand_out(t: Tier, block: int) -> None:
    """A block is handed out in this step; 0 is none."""
    if block > 0 and t.handed[block] != t.step:
        t.handed[block] = t.step
        t.fresh[t.renewed] = block
        t.renewed += 1


def fence(t: Tier, job: Job, late: int) -> None:
    """A job reads blocks that may be handed out from now on: those that are fenced from the beginning, or `late`."""
    clause("fence", "OffloadingConnectorScheduler._block_id_to_pending_jobs", "blocks that a job reads are fenced")
    use = job.first if job.writes else None
    while use is not None:
        if is_late(t, job, use) == late:
            for at in range(t.config.per_chunk):
                block = use.blocks[at]
                if block > 0:
                    fence_block(t, job, block)
                    if late and t.handed[block] == t.step:
                        flush(t, job)
        use = use.next


def is_late(t: Tier, job: Job, use: Use) -> bool:
    """True of a chunk whose blocks are fenced once its request has finished."""
    return not job.early and t.groups[use.key.group + 1].window == 0


def fence_block(t: Tier, job: Job, block: int) -> None:
    """A job reads a block, which is noted once."""
    found = t.fences[block]
    while found is not None:
        if found.job is job:
            return
        found = found.next
    made = t.idle_fence
    t.idle_fence = made.next
    made.job, made.next, t.fences[block] = job, t.fences[block], made
    t.fenced += 1


def flush(t: Tier, job: Job) -> None:
    """A job is to be finished before the step."""
    if not job.flushed:
        clause("flush", "OffloadingConnectorScheduler._build_connector_meta", "jobs are finished before a step")
        job.flushed = 1
        t.flushed[t.flushes] = job.number
        t.flushes += 1


def flush_readers(t: Tier) -> None:
    """Jobs that read what was handed out since the last step are finished before this one."""
    for at in range(t.renewed):
        found = t.fences[t.fresh[at]]
        while found is not None:
            flush(t, found.job)
            found = found.next


def report(t: Tier, job: Job, workers: int) -> int:
    """Workers have finished their parts of a job; the block that it reads twice, a KeyError in vLLM, or 0."""
    clause("report", "OffloadingConnectorScheduler.update_connector_output")
    job.left -= workers
    twice = 0
    if job.left == 0:
        request = job.owner
        use = job.first
        while use is not None:
            transferred(t, use.key, job.writes, True)
            use.key.loading = 0
            if twice == 0 and job.writes and (request.finished or not is_late(t, job, use)):
                for at in range(t.config.per_chunk):
                    if twice == 0 and use.blocks[at] > 0 and not unfence(t, job, use.blocks[at]):
                        twice = use.blocks[at]
            use = use.next
        if twice == 0:
            end_job(t, job)
    return twice


def unfence(t: Tier, job: Job, block: int) -> bool:
    """A job reads a block no more; False if no job does."""
    found, before = t.fences[block], t.idle_fence
    if found is None:
        return False
    if found.job is job:
        t.fences[block] = found.next
    else:
        before = found
        found = found.next
        while found is not None and found.job is not job:
            before = found
            found = found.next
        if found is not None:
            before.next = found.next
    if found is not None:
        found.next, t.idle_fence = t.idle_fence, found
        t.fenced -= 1
    return True


def end_job(t: Tier, job: Job) -> None:
    """A job is its request's no more."""
    request = job.owner
    if request.first is job:
        request.first = job.after
    else:
        before = request.first
        while before.after is not job:
            before = before.after
        before.after = job.after
    job.after, t.idle_job = t.idle_job, job


def forget_jobs(t: Tier, request: Offloaded) -> None:
    """A request's jobs are flushed, and their reports mean nothing any more."""
    while request.first is not None:
        job = request.first
        flush(t, job)
        use = job.first
        while use is not None:
            use.key.loading = 0
            if job.writes:
                for at in range(t.config.per_chunk):
                    if use.blocks[at] > 0:
                        unfence(t, job, use.blocks[at])
            use = use.next
        end_job(t, job)
