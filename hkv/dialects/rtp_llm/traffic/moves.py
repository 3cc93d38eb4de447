"""Moves of random traffic under RTP-LLM's rules, one by one, for state machines."""

from __future__ import annotations

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.traffic.traffic import MOST_RUNNING, MOST_WAITING, RtpTraffic


class RtpTrafficMoves(RtpTraffic):
    """Traffic of which each move can be made by itself; see `hkv.contract.traffic.Moves`."""

    def possible(self, move: str) -> bool:
        """True if there is a request that the move can be about, and the configuration is about such moves."""
        if move == "arrive":
            return len(self._waiting) < MOST_WAITING
        if move == "admit":
            return bool(self._waiting) and len(self._running) < MOST_RUNNING
        if move == "estimate":
            return bool(self._waiting or self._running)
        if move == "connect":
            return self._header.feature == "connector"
        if move == "fork":
            return self._header.feature == "fork" and bool(self._running)
        return move in ("evict", "state") or bool(self._running)

    def make(self, move: str) -> None:
        """Makes a move."""
        getattr(self, move)()

    def arrive(self) -> None:
        """A request arrives; now and then with the prompt of an earlier one."""
        self._arrive()

    def admit(self) -> None:
        """A waiting request asks for blocks."""
        self._admit(self._choices.pick(self._waiting))

    def grow(self) -> None:
        """A running request has more tokens and asks for their blocks; another gives way where there are none."""
        self._grow(self._choices.pick(self._running))

    def fork(self) -> None:
        """Sequences of a running request become copies of one another."""
        self._fork(self._choices.pick(self._running))

    def insert(self) -> None:
        """A running request enters its whole blocks."""
        request = self._choices.pick(self._running)
        self._perform(structs.InsertOp(id=request.id, resident=self._resident()))

    def preempt(self) -> None:
        """A running request gives back all it has."""
        self._preempt(self._choices.pick(self._running))

    def end(self) -> None:
        """A running request ends, mostly entered."""
        self._end(self._choices.pick(self._running), entered=self._choices.chance(90))

    def evict(self) -> None:
        """Some cached blocks are evicted."""
        self._perform(structs.EvictOp(least=self._choices.integer(0, 4)))

    def estimate(self) -> None:
        """A request's peak is asked for."""
        self._estimate()

    def connect(self) -> None:
        """A connector takes hold of blocks, lets go of them, or takes evicted ones over."""
        self._connect()

    def state(self) -> None:
        """Reads the whole state."""
        self._perform(structs.StateOp())
