"""Random traffic of vLLM's rules on two readings of them: the text, run plainly, and the reference of classes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.answer import Failure, Mismatch
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.traffic.live import drive
from hkv.oracle.engine import attempt
from hkv.oracle.record import ALL, Only, draw

DIALECT = registry.dialect_of(NAME)


class _Over(Exception):  # noqa: N818
    """Both failed alike."""


def seen(engine: Any) -> tuple[Any, ...]:
    """All that can be seen of an engine but its state in the words of logs."""
    return engine.pending_copies(), engine.evictions, engine.num_free()


def held_together(
    feature: str, seed: int, version: int, steps: int, bugs: Sequence[str] | None = None, only: Only = ALL
) -> tuple[int, bool]:
    """Drives both through the traffic of a seed; after every operation, answers and whole states are equal.

    Args:
      feature: of the traffic.
      seed: of the traffic.
      version: of the log format.
      steps: of scheduling.
      bugs: defects to reproduce, in traffic that does not keep clear of them; None for those of the configuration.
      only: configurations that count.

    Returns:
      Number of operations, and whether a defect ended both.
    """
    header, choices = draw(feature, seed, version, only)
    if bugs is not None:
        header = msgspec.structs.replace(header, bugs=list(bugs))
    right, tested = NumpyEngine(header), PlainEngine(header)
    count, failed = 0, False

    def perform(operation: Any) -> Any:
        nonlocal count, failed
        count += 1
        want, got = (attempt(DIALECT, engine, operation) for engine in (right, tested))
        if isinstance(want, Failure) and isinstance(got, Failure):
            assert want.named
            assert got.named
            failed = True
            raise _Over
        assert _differing(want, got, version) is None, (feature, seed, version, count, operation)
        states = _differing(right.state(), tested.state(), version)
        assert states is None, (feature, seed, version, count, operation, states)
        assert seen(tested) == seen(right)
        return want

    with contextlib.suppress(_Over):
        drive(header, choices, perform, steps, careful=bugs is None)
    return count, failed


def _differing(want: Any, got: Any, version: int) -> Mismatch | None:
    if isinstance(want, Failure) or isinstance(got, Failure):
        return Mismatch("error", want, got)
    return DIALECT.compare(want, got, version)
