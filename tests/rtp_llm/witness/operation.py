"""Arguments and results of an allocation."""

from __future__ import annotations

import dataclasses
import enum

from hkv.errors import OperationError
from tests.rtp_llm.witness.resource import BatchResource


class MallocVerdict(enum.IntEnum):
    """Reason why an allocation failed (RTP-LLM's malloc error codes)."""

    NONE = 0
    """No failure."""
    PERMANENT = 1
    """Failure for good: the pools are too small."""
    RETRYABLE = 2
    """Failure for now: it fits when others give blocks back."""
    INTERNAL_ERROR = 3
    """Failure of an allocation that should have fitted: what the cache holds could not be evicted."""


@dataclasses.dataclass
class Tokens:
    """Lengths of a request's sequences, in tokens (RTP-LLM `CompleteTokenIds`).

    Attributes:
      seq: tokens of each sequence.
      batch: sequences.
      block_size: tokens per cache key.
      reserve: tokens to come in a step beyond the next one's: drafts and one, 0 without speculation.
      common: tokens that all sequences share: all of a single one's, else whole blocks, fixed when they begin.
    """

    seq: int
    batch: int = 1
    block_size: int = 1
    reserve: int = 0
    common: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for name, least in (("seq", 1), ("batch", 1), ("block_size", 1), ("reserve", 0)):
            if getattr(self, name) < least:
                raise OperationError(name, getattr(self, name), f"at least {least}")
        self.common = self.seq if self.batch == 1 else self.seq // self.block_size * self.block_size

    @property
    def total(self) -> int:
        """Tokens and reserve."""
        return self.seq + self.reserve

    def set_length(self, seq: int) -> None:
        """The sequences have `seq` tokens now."""
        self.seq = seq
        if self.batch == 1:
            self.common = seq


@dataclasses.dataclass
class MallocInfo:
    """Arguments of an allocation (RTP-LLM `MallocInfo`).

    Attributes:
      resource: the request's blocks, which change.
      tokens: its lengths.
      reuse: its blocks may be reused by others: states on the grid are kept.
      device_cache: it may take over cached blocks, when it is new.
      cleanup: blocks that decoding does not need are given back afterwards.
      seq: tokens of each sequence that get slots, instead of all (RTP-LLM `incr_seq_len_override`); None for all.
    """

    resource: BatchResource
    tokens: Tokens
    reuse: bool = True
    device_cache: bool = True
    cleanup: bool = True
    seq: int | None = None

    @property
    def length(self) -> int:
        """Tokens of each sequence that get slots."""
        return self.tokens.seq if self.seq is None else self.seq

    @property
    def common(self) -> int:
        """Tokens that all sequences share, never more than there are."""
        return min(self.tokens.common, self.tokens.total)


@dataclasses.dataclass(frozen=True)
class MallocResult:
    """Result of an allocation.

    Attributes:
      reused: tokens that need not be computed, as cached blocks have them.
      verdict: reason why it failed; NONE if it did not.
    """

    reused: int = 0
    verdict: MallocVerdict = MallocVerdict.NONE

    @property
    def success(self) -> bool:
        """True if it was granted."""
        return self.verdict is MallocVerdict.NONE


@dataclasses.dataclass(frozen=True)
class CopyPair:
    """A block whose content a forked sequence needs in a block of its own.

    Attributes:
      tag: the group.
      source: the block to copy.
      target: block to copy to.
    """

    tag: str
    source: int
    target: int
