"""Request traces through the radix cache."""

from hkv.replay.plain import PlainLoop
from hkv.replay.schedule import LiveRequest
from toy_dialect.log import AdmitOp, AppendOp, FreeOp, StateOp


class ToyReplay(PlainLoop):
    """The schedule's questions as operations."""

    def _enter(self, live: LiveRequest, tokens: list[int]) -> int | None:
        answer = self._engine.perform(AdmitOp(id=live.id, tokens=tokens))
        return None if answer.blocks is None else answer.hit

    def _append(self, live: LiveRequest, tokens: list[int]) -> bool:
        return self._engine.perform(AppendOp(id=live.id, tokens=tokens)).blocks is not None

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        self._engine.perform(FreeOp(id=live.id, keep=finished))

    def _available(self) -> int:
        state = self._engine.perform(StateOp())
        return len(state.free) + sum(not users for _, _, users in state.cached)
