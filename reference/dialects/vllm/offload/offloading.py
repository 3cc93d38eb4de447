"""A scheduler with vLLM's own offloading (`OffloadingConnector`)."""

from __future__ import annotations

from reference.dialects.vllm.offload.connector import allocated, arrive, finish, match, report, reset, step
from reference.dialects.vllm.offload.lives import Failed, Live, Serving
from reference.dialects.vllm.offload.records import TAIL_FAILED, Mail, Tier
from reference.dialects.vllm.offload.telling import hand_out_copies, hand_over, tell_ended
from reference.language import Text

TEXT = Text(__name__)


class Offloading(Serving):
    """Requests, the GPU's cache, and a tier of chunks behind it."""

    tier: Tier

    def mail(self) -> Mail:
        """Things that the tier is told of."""
        return self.tier.mail

    def arrive(self, live: Live, load_limit: int, store_limit: int) -> None:
        """A request comes."""
        self.tier.requests[live.slot + 1].hashes = 0
        self.know(live)
        arrive(self.tier, self.tier.requests[live.slot + 1], load_limit, store_limit)

    def know(self, live: Live) -> None:
        """The tier learns the cache's numbers of a request."""
        request, state = live.request, self.tier.requests[live.slot + 1]
        state.prompt, state.tokens, state.computed = request.prompt, request.tokens, request.computed
        state.shared = request.branch
        for at in range(state.hashes, request.keys):
            state.chain[at] = request.chain[at]
        state.hashes = request.keys

    def match(self, live: Live, local: int) -> tuple[int, bool]:
        """Tokens beyond a request's hit on the GPU that can be loaded."""
        return match(self.tier, self.tier.requests[live.slot + 1], local)

    def allocated(self, live: Live, external: int) -> None:
        """A request was given blocks."""
        allocated(self.tier, self.tier.mail.rows[self.tier.mail.count], external)

    def finish(self, live: Live, aborted: int) -> None:
        """A request has finished."""
        finish(self.tier, self.tier.requests[live.slot + 1], aborted)

    def order(self) -> None:
        """A step is scheduled. States are taken before the copies that they may be made by."""
        handed = hand_over(self)
        targets = hand_out_copies(self)
        tell_ended(self)
        op, mail = self.tier.operations[1], self.tier.mail
        op.start, op.count, op.handed_start, op.handed = 1, mail.count, 1, handed
        op.targets_start, op.targets = mail.filled, targets
        if step(self.tier, op) == TAIL_FAILED:
            self.failed = Failed.TAIL

    def loaded(self, live: Live) -> None:
        """Workers have loaded what a request waits for, which the report of its job says."""

    def report(self, job: int, workers: int) -> None:
        """Workers have finished their parts of a job."""
        twice = report(self.tier, self.tier.jobs[job], workers)
        if twice > 0:
            self.failed, self.culprit = Failed.TWICE, twice

    def empty(self) -> bool:
        """Empties the tier."""
        reset(self.tier)
        return True
