"""Two engines side by side: one in doubt, one that counts."""

from __future__ import annotations

from typing import Any

from hkv.dialects.rtp_llm.log.structs import RtpHeader
from hkv.dialects.rtp_llm.pair import RtpPair
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Answer, Header, Operation
from hkv.errors import ConfigError, EngineProcessError, MissingExtraError, UnsupportedConfigError
from hkv.oracle.compare import Mismatch, compare
from hkv.oracle.engine import Engine, EngineFactory, Failure, attempt, failure_of
from hkv.oracle.renaming import RENAMINGS, Renaming


class Pair:
    """Performs every operation on both engines and compares what they answer.

    Args:
      tested: the engine in doubt.
      right: the engine whose answers count.
      header: the configuration.
      ids: `exact`, or `isomorphic`: block ids may differ by a renaming.

    Attributes:
      timed_out: whether the engine in doubt was silent, at any operation, for as long as it may be.
    """

    def __init__(self, tested: Engine, right: Engine, header: Header, ids: str = "exact") -> None:
        self.tested = tested
        self.right = right
        self.timed_out = False
        self._version = header.oplog
        self._renaming = _renaming(ids)(to_config(header).block_sizes)

    def perform(self, operation: Operation) -> tuple[Answer | Failure, Mismatch | None]:
        """The right engine's answer, and where the tested one's differs from it."""
        if self._renaming.wants_state and isinstance(operation, oplog.EvictOp):
            self._renaming.answer(*self._states())
        got = attempt(self.tested, self._renaming.operation(operation))
        self.timed_out |= isinstance(got, Failure) and got.timed_out
        want = attempt(self.right, operation)
        mismatch = compare(want, self._renaming.answer(want, got), self._version)
        if self._renaming.wants_state and isinstance(operation, oplog.AllocateOp) and operation.external:
            self._renaming.learn_external(operation, *self._states())
        return want, mismatch

    def _states(self) -> tuple[Answer | Failure, Answer | Failure]:
        return attempt(self.right, oplog.StateOp()), attempt(self.tested, oplog.StateOp())


def make_pair(
    tested: EngineFactory, right: EngineFactory, header: Header | RtpHeader, ids: str = "exact"
) -> Pair | RtpPair | Mismatch:
    """Both engines, empty, or how they disagree about the configuration itself.

    Raises:
      UnsupportedConfigError: one of them does not implement it, and says so.
      EngineProcessError, MissingExtraError: one of them cannot start.
    """
    _renaming(ids)
    made: list[Any] = []
    for factory in (tested, right):
        try:
            made.append(factory(header))
        except (UnsupportedConfigError, EngineProcessError, MissingExtraError):
            raise
        except Exception as error:
            made.append(failure_of(error))
    got, want = made
    if isinstance(got, Failure) or isinstance(want, Failure):
        said = [engine.message if isinstance(engine, Failure) else "accepted" for engine in (want, got)]
        return Mismatch("header", *said)
    return RtpPair(got, want, ids) if isinstance(header, RtpHeader) else Pair(got, want, header, ids)


def _renaming(ids: str) -> type[Renaming]:
    try:
        return RENAMINGS[ids]
    except KeyError:
        raise ConfigError("ids", ids, f"one of {', '.join(RENAMINGS)}") from None
