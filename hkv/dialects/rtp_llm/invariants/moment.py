"""One operation under RTP-LLM's rules, with the cache before and after it, and what the operations so far say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from hkv.contract.invariant import Invariant, Register
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NULL, SINGLE, RtpConfig
from hkv.dialects.rtp_llm.engines.engine import RtpEngine
from hkv.dialects.rtp_llm.log import Lists, RtpAnswer, RtpHeader, RtpOp, RtpState, to_rtp_config
from hkv.errors import OperationError
from hkv.keys.rolling import first_keys
from hkv.model.group_policy import CpMapping, GroupType

Held = dict[tuple[int, int], int]
"""References to blocks: `(pool, block)` to how many."""

Slots = dict[tuple[int, int], int]
"""Cached blocks: from `(key, group)` to the block."""


@dataclasses.dataclass
class RtpRecord:
    """A request as its operations leave it.

    Attributes:
      tokens: of each sequence.
      reserve: tokens to come in a step beyond the next one's.
      shared: whether sequences may write into one another's blocks: forked without copies; forked with slots ahead,
        where the one copied block is not the one that is written next; freed and begun anew, as if they were equal; or
        forked after their blocks were entered, when a copy may go into a block of a sequence that is given up.
      entered: whether its blocks were entered into the cache since it last waited.
    """

    tokens: list[list[int]]
    reserve: int
    shared: bool = False
    entered: bool = False


class RtpLedger:
    """Follows operations and their answers.

    Args:
      config: the cache's configuration.

    Attributes:
      requests: every request that was not dropped, by name.
      held: of everything that is held under a name, the role and the blocks.
      exported: of everything that was exported under a name and not settled, the blocks.
      resident: keys that were entered never to be evicted.
      unsure: keys entered by requests whose sequences may write into one another's blocks.
      parents: the key that each key was last entered behind; None for a first one.
    """

    def __init__(self, config: RtpConfig) -> None:
        self._config = config
        self.requests: dict[str, RtpRecord] = {}
        self.held: dict[str, tuple[str, Held]] = {}
        self.exported: dict[str, Held] = {}
        self.resident: set[int] = set()
        self.unsure: set[int] = set()
        self.parents: dict[int, int | None] = {}

    def follow(self, operation: RtpOp, answer: RtpAnswer, lists: Mapping[str, Lists]) -> None:
        """Takes note of an operation that was performed, of its answer, and of every request's blocks before it."""
        match operation:
            case structs.RequestOp():
                tokens = [list(operation.tokens) for _ in range(operation.sequences)]
                self.requests[operation.id] = RtpRecord(tokens, operation.reserve)
            case structs.AppendOp():
                for known, more in zip(self.requests[operation.id].tokens, operation.tokens, strict=True):
                    known += more
            case structs.ForkOp() if operation.sources and isinstance(answer, structs.Fork):
                record = self.requests[operation.id]
                if answer.copies is not None:
                    slots = -(-len(record.tokens[0]) // self._config.block_size)
                    ahead = any(len(blocks) > slots for row in lists.get(operation.id, []) for blocks in row)
                    record.tokens = [list(record.tokens[source]) for source in operation.sources]
                    record.shared |= not operation.copy_last or ahead or record.entered
            case structs.FreeOp():
                record = self.requests[operation.id]
                record.shared, record.entered = len(record.tokens) > 1, False
            case structs.DropOp():
                del self.requests[operation.id]
            case structs.InsertOp():
                self.requests[operation.id].entered = True
                self._entered(operation, lists.get(operation.id, []))
            case structs.HoldOp() if isinstance(answer, structs.Selected) and answer.blocks is not None:
                role = "connector" if operation.connector else "request"
                self.held[operation.name] = (role, self._counted(answer.blocks))
            case structs.ReleaseOp():
                del self.held[operation.name]
            case structs.ExportOp() if isinstance(answer, structs.Selected) and answer.blocks is not None:
                self.exported[operation.name] = self._counted(answer.blocks)
            case structs.SettleOp():
                del self.exported[operation.name]
            case _:
                pass

    def _entered(self, operation: structs.InsertOp, rows: Lists) -> None:
        for sequence, row in enumerate(rows if self._config.name != SINGLE else rows[:1]):
            keys = self.keys(operation.id, sequence)
            for position, key in enumerate(keys):
                self.parents[key] = keys[position - 1] if position else None
                if self.requests[operation.id].shared:
                    self.unsure.add(key)
                if operation.resident and self._is_held(row, position):
                    self.resident.add(key)

    def _is_held(self, row: list[list[int]], position: int) -> bool:
        """True if some group that is cached has a block there: every one, where ranks hold different parts."""
        cached = [
            blocks
            for blocks, policy in zip(row, self._config.policies, strict=True)
            if policy.enable_prefix_reuse and position < len(blocks)
        ]
        every = all if self._config.cp_size > 1 else any
        return bool(cached) and every(blocks[position] != NULL for blocks in cached)

    def _counted(self, blocks: list[list[int]]) -> Held:
        pools = self._config.topology.num_pools
        return dict(Counter((g if pools > 1 else 0, b) for g, row in enumerate(blocks) for b in row if b > 0))

    def keys(self, id: str, sequence: int, *, partial: bool = False) -> list[int]:
        """Keys of a sequence's whole blocks, by the hash's definition; with `partial`, of a last, unfinished one too.

        Under context parallelism those of whole rounds over the ranks.
        """
        tokens, config = self.requests[id].tokens[sequence], self._config
        found = first_keys(tokens, config.block_size)
        keys = found.keys if partial else found.without_partial().keys
        return list(keys[config.cp_size - 1 :: config.cp_size])


@dataclasses.dataclass(frozen=True)
class RtpMoment:
    """Operation to judge, with the cache before and after it.

    Attributes:
      config: the cache's configuration.
      ledger: requests as the operations up to this one tell them.
      operation: the operation.
      answer: the engine's answer.
      before: the cache before it.
      after: the cache after it.
    """

    config: RtpConfig
    ledger: RtpLedger
    operation: RtpOp
    answer: RtpAnswer
    before: RtpState
    after: RtpState

    def pool_of(self, group: int) -> int:
        """The pool from which a group takes its blocks."""
        return group if self.config.topology.num_pools > 1 else 0

    def is_full(self, group: int) -> bool:
        """True if a group keeps every block."""
        return self.config.policies[group].group_type is GroupType.FULL

    def slots(self, state: RtpState) -> Slots:
        """Cached blocks of each group under each key."""
        return {(key, g): block for key, row in state.cached for g, block in enumerate(row) if block != NULL}

    @property
    def left(self) -> Slots:
        """Blocks that are not cached any more, or whose key has another block now."""
        after = self.slots(self.after)
        return {name: block for name, block in self.slots(self.before).items() if after.get(name) != block}

    @property
    def entered(self) -> Slots:
        """Blocks that were not cached before, or whose key had another block."""
        before = self.slots(self.before)
        return {name: block for name, block in self.slots(self.after).items() if before.get(name) != block}

    @property
    def tokens_of_a_key(self) -> int:
        """Tokens that one key of a hit counts for: a round over the ranks, if a full group is dealt out to them."""
        full = [self.config.policies[group] for group in self.config.full_groups]
        dealt = bool(full) and full[0].cp_mapping is CpMapping.BLOCK_ROUND_ROBIN
        return self.config.block_size * (self.config.cp_size if dealt else 1)

    @property
    def granted(self) -> bool:
        """True if the operation is an allocation that was granted."""
        return isinstance(self.answer, structs.Malloc) and self.answer.verdict == "granted"


RTP_INVARIANTS = Register("rtp-llm")
"""Every invariant of logs under RTP-LLM's rules, by name."""

rtp_invariant = RTP_INVARIANTS.invariant


# An engine of RTP-LLM's logs under watch: every operation passes through, and every invariant is asked after it.


class RtpWatch:
    """Performs operations on an engine and checks invariants after each.

    Args:
      engine: the engine; `state` must change nothing.
      header: its configuration.
      invariants: those to check; all by default.

    Attributes:
      ledger: requests as the operations so far tell them.
      state: the cache as it is.
    """

    def __init__(self, engine: RtpEngine, header: RtpHeader, invariants: Iterable[Invariant] | None = None) -> None:
        self._engine = engine
        self._config = to_rtp_config(header)
        self._invariants = tuple(RTP_INVARIANTS.values() if invariants is None else invariants)
        self.ledger = RtpLedger(self._config)
        self.state = self._read()

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """
        answer = self._engine.perform(operation)
        self.ledger.follow(operation, answer, self.state.lists)
        before, self.state = self.state, self._read()
        moment = RtpMoment(self._config, self.ledger, operation, answer, before, self.state)
        for invariant in self._invariants:
            invariant(moment)
        return answer

    def _read(self) -> RtpState:
        state = self._engine.perform(structs.StateOp())
        if not isinstance(state, RtpState):
            raise OperationError("state", state, "a state")
        return state
