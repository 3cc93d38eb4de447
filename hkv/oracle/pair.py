"""Two engines side by side: one in doubt, one that counts."""

from __future__ import annotations

from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory, Failure, Mismatch, SameNames, failure_of
from hkv.contract.dialect import Dialect
from hkv.errors import EngineProcessError, MissingExtraError, UnsupportedConfigError
from hkv.oracle.engine import attempt, compare, make_engine


class Pair:
    """Performs every operation on both engines and compares what they answer.

    Args:
      dialect: dialect of the operations.
      tested: the engine in doubt.
      right: the engine whose answers count.
      version: of the log format.
      names: comparison of their block ids.

    Attributes:
      timed_out: whether the engine in doubt was silent, at any operation, for as long as it may be.
    """

    def __init__(self, dialect: Dialect, tested: Any, right: Any, version: int, names: SameNames) -> None:
        self.tested = tested
        self.right = right
        self.timed_out = False
        self._dialect, self._version, self._names = dialect, version, names
        self._lacks = dialect.lacking(tested) | dialect.lacking(right)

    def perform(self, operation: Any) -> tuple[Any, Mismatch | None]:
        """The right engine's answer, or the Failure in its place, and where the tested one's differs from it."""
        got = attempt(self._dialect, self.tested, self._names.operation(operation, self._both))
        self.timed_out |= isinstance(got, Failure) and got.timed_out
        want = attempt(self._dialect, self.right, operation)
        mismatch = compare(self._dialect, want, self._names.answer(want, got), self._version, self._lacks)
        self._names.learn(operation, self._both)
        return want, mismatch

    def _both(self, operation: Any) -> tuple[Any, Any]:
        return attempt(self._dialect, self.right, operation), attempt(self._dialect, self.tested, operation)


def make_pair(tested: EngineFactory, right: EngineFactory, header: Any, ids: str = "exact") -> Pair | Mismatch:
    """Both engines, empty, or how they disagree about the configuration itself.

    Raises:
      ConfigError: block ids cannot be compared in that way.
      UnsupportedConfigError: one of them does not implement the configuration, and says so.
      EngineProcessError, MissingExtraError: one of them cannot start.
    """
    dialect = registry.dialect_of(header.dialect)
    names = dialect.renaming(ids, header)
    made: list[Any] = []
    for factory in (tested, right):
        try:
            made.append(make_engine(factory, header))
        except (UnsupportedConfigError, EngineProcessError, MissingExtraError):
            raise
        except Exception as error:
            made.append(failure_of(error))
    got, want = made
    if isinstance(got, Failure) or isinstance(want, Failure):
        said = [engine.message if isinstance(engine, Failure) else "accepted" for engine in (want, got)]
        return Mismatch("header", *said)
    return Pair(dialect, got, want, header.oplog, names)
