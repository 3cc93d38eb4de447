"""A connector in random traffic: takes the states that it is offered, and holds the blocks of some for a while."""

from __future__ import annotations

from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Answer, CacheState, Header, Offer, Operation
from hkv.dialects.vllm.traffic.headers import OFFERS, later_choices
from hkv.dialects.vllm.traffic.traffic import Perform
from hkv.spec import KINDS

LOSING = (oplog.LookupOp, oplog.RetireOp, oplog.CopiesOp)
"""Operations before which offers are taken if a state that was lost must not be offered: of those that may lose one;
for the allocation of a waiting request, the lookup that it follows."""


class Connector:
    """Stands between traffic and the engine, and takes offers in time where vLLM would offer what is gone.

    Args:
      header: the configuration. Nothing is taken where nothing is offered.
      perform: performs an operation.
      careful: whether to keep clear of what vLLM gets wrong, unless the header names it.
    """

    def __init__(self, header: Header, perform: Perform, careful: bool) -> None:
        self._perform, self._offers = perform, header.offloads
        self._in_time = careful and OFFERS not in header.bugs
        self._choices = later_choices(header, "connector")
        self._recurrent = [KINDS[group["kind"]].snapshot for group in header.groups]
        self._running: set[str] = set()
        self._pending = False

    def perform(self, operation: Operation) -> Answer:
        """Performs an operation, after what is due before it."""
        if not self._offers:
            return self._perform(operation)
        grows = isinstance(operation, oplog.AllocateOp) and operation.id in self._running
        if self._in_time and self._pending and (grows or isinstance(operation, LOSING)):
            self._drain()
        if self._in_time and isinstance(operation, oplog.EvictOp):
            operation = self._spare_states(operation)
        self._pending |= isinstance(operation, oplog.AllocateOp | oplog.CommitOp)
        answer = self._perform(operation)
        if isinstance(operation, oplog.AllocateOp) and isinstance(answer, oplog.Allocation) and answer.blocks:
            self._running.add(operation.id)
        elif isinstance(operation, oplog.FreeOp | oplog.PopOp):
            self._running.discard(operation.id)
        return answer

    def _spare_states(self, operation: oplog.EvictOp) -> oplog.EvictOp:
        """The same without blocks of states in use: of some, a copy is still to be offered."""
        state = self._perform(oplog.StateOp())
        assert isinstance(state, CacheState)
        used = {int(block) for block in state.refs.keys() & state.cached.keys()}
        states = {block for block in used if self._recurrent[state.cached[str(block)][0]]}
        return oplog.EvictOp(blocks=[block for block in operation.blocks if block not in states])

    def take(self) -> list[int]:
        """Takes what is offered at the end of a step; the blocks that are held from now on."""
        if not self._offers or not (self._in_time or self._choices.chance(85)):
            return []
        return self._hold(self._drain())

    def _drain(self) -> list[Offer]:
        self._pending = False
        offers = self._perform(oplog.OffloadsOp())
        assert isinstance(offers, dict)
        return [offer for states in offers.values() for offer in states]

    def finalize(self, id: str, in_flight: int) -> list[int]:
        """A request is about to end; the blocks that are held from now on."""
        if not self._offers or not self._choices.chance(70):
            return []
        tails = self._perform(oplog.FinalizeOp(id=id, in_flight=in_flight))
        assert isinstance(tails, list)
        return self._hold(tails)  # type: ignore[arg-type]

    def ends(self) -> bool:
        """True if a request that may just have registered the end of its prompt is to end there."""
        return self._offers and self._choices.chance(25)

    def stops(self) -> bool:
        """True if a chunk is to end where the same prompt resumes, so that its state is registered there."""
        return self._offers and self._choices.chance(25)

    def _hold(self, offers: list[Offer]) -> list[int]:
        """Holds the blocks of some states: not those that hold something else by now, which may be written."""
        if not offers or not self._choices.chance(50):
            return []
        state = self._perform(oplog.StateOp())
        assert isinstance(state, CacheState)
        known = {block: state.cached.get(str(block), (0, 0, ""))[1] == tokens for _, block, tokens in offers}
        blocks = [block for block in known if known[block]]
        if blocks:
            self._perform(oplog.HoldOp(blocks=blocks))
        return blocks
