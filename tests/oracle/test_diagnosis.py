"""The first line of `hkv diff` about engines that are wrong in ways whose consequences come later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from hkv.dialects.vllm.dialect import VllmDialect
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, ExtraKeys, Header
from hkv.oracle.broken_invariant import on_its_own
from hkv.oracle.comparison import diff
from hkv.oracle.engines import trusted_first
from hkv.oracle.record import draw


class FreesUnderAStep(NumpyEngine):
    """Gives back blocks that a step in flight still reads."""

    def allocate(self, operation: AllocateOp) -> Allocation:
        return super().allocate(msgspec.structs.replace(operation, in_flight=0))


class SharesAdapters(NumpyEngine):
    """Two adapters have the same keys."""

    def request(
        self, id: str, tokens: Sequence[int], extra: ExtraKeys | None, keys: Sequence[str] | None = None
    ) -> None:
        plain = extra if extra is None else msgspec.structs.replace(extra, lora=None)
        super().request(id, tokens, plain, keys)


class DropsNothing(NumpyEngine):
    """Knows no EAGLE drop."""

    def __init__(self, header: Header) -> None:
        super().__init__(msgspec.structs.replace(header, eagle=False, prefill_lookahead=0))


class NamesWrongly(NumpyEngine):
    """The key of a block is of other tokens than it holds."""

    def request(
        self, id: str, tokens: Sequence[int], extra: ExtraKeys | None, keys: Sequence[str] | None = None
    ) -> None:
        super().request(id, [0, *tokens[1:]], extra, keys)


class KeepsAfterPreemption(NumpyEngine):
    """A request that is preempted gives its blocks back, and still writes to them."""

    def free(self, id: str) -> None:
        rows = [list(row.blocks) for kind in self.manager.cache.kinds if (row := kind.rows.get(id))]
        super().free(id)
        if rows and any(rows):
            for kind, row in zip(self.manager.cache.kinds, rows, strict=False):
                kind.row(id).blocks = row


class RetiresOnce(NumpyEngine):
    """A request that comes again gives nothing back as it outgrows a window."""

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self._freed: set[str] = set()
        for kind in self.manager.cache.kinds:
            kind.retire = self._unless_freed(kind.retire)  # type: ignore[method-assign]

    def _unless_freed(self, retire: Callable[[str, int], None]) -> Callable[[str, int], None]:
        return lambda id, processed: None if id in self._freed else retire(id, processed)

    def request(
        self, id: str, tokens: Sequence[int], extra: ExtraKeys | None, keys: Sequence[str] | None = None
    ) -> None:
        super().request(id, tokens, extra, keys)
        self._freed.discard(id)

    def free(self, id: str) -> None:
        super().free(id)
        self._freed.add(id)


DEFECTS: list[tuple[type[NumpyEngine], str, set[str]]] = [
    (FreesUnderAStep, "core", {"retirement", "shadow tags", "admission", "hit admission"}),
    (SharesAdapters, "core", {"identity", "soundness", "shadow tags"}),
    (DropsNothing, "eagle", {"draft margin", "registration", "consistency"}),
    (NamesWrongly, "core", {"identity", "soundness", "event index", "shadow tags"}),
    (KeepsAfterPreemption, "core", {"release", "references", "ownership", "form"}),
]
"""Engines that are wrong, the traffic that shows it, and the invariants of which one is to be named."""


@pytest.mark.parametrize(("engine", "feature", "names"), DEFECTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_defect_is_diagnosed(engine: Any, feature: str, names: set[str]) -> None:
    result = diff(engine, "numpy", features=[feature], seeds=60, first_seed=0, version=2)
    assert result.found, "no difference"
    (found,) = result.found
    assert found.invariant in names, found.broken
    assert len(found.case.operations) <= 12


def test_the_engine_that_is_not_of_hkv_is_in_doubt_in_either_order() -> None:
    headlines = []
    for order in ((FreesUnderAStep, "numpy"), ("numpy", FreesUnderAStep)):
        result = diff(*order, features=["core"], seeds=60, version=2)
        assert result.engines == ("FreesUnderAStep", "numpy")
        (found,) = result.found
        assert isinstance(found.broken_by_other, str)
        assert found.case.mismatch.want == found.record()["want"]
        headlines.append(found.headline)
    assert headlines[0] == headlines[1]
    assert headlines[0].startswith("retirement: after allocate ")


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (("numpy", "vllm"), ("numpy", "vllm")),
        (("vllm", "numpy"), ("numpy", "vllm")),
        (("vllm@0.34", "jax"), ("jax", "vllm@0.34")),
        (("numpy", "jax"), ("numpy", "jax")),
        (("jax", "numpy"), ("numpy", "jax")),
        ((SharesAdapters, "cmd:./engine"), ("cmd:./engine", SharesAdapters)),
        ((NumpyEngine, SharesAdapters), (NumpyEngine, SharesAdapters)),
    ],
)
def test_the_one_that_counts(engines: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert trusted_first(engines, "vllm-0.33") == expected


def test_an_own_engine_that_breaks_an_invariant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the reference be wrong, and the engine in doubt right, the report says so."""

    class RightEngine(NumpyEngine):
        """As the reference was before it became wrong."""

    monkeypatch.setattr(VllmDialect, "engines", {"numpy": f"{__name__}:FreesUnderAStep"})
    (found,) = diff(RightEngine, "numpy", features=["core"], seeds=60, version=2).found
    assert found.invariant is None
    assert found.headline.startswith("numpy itself breaks retirement: after allocate ")
    assert found.record()["invariant_of_other"] == "retirement"


def test_a_request_that_comes_again_is_said_to():
    windows = ("sliding_window",)
    (found,) = diff(
        RetiresOnce, "numpy", features=["core"], seeds=1, first_seed=4, kinds=windows, max_groups=1, version=2
    ).found
    assert found.invariant == "retirement"
    assert "which was preempted and has come back, still has" in found.headline


def test_nothing_is_called_consistent() -> None:
    header, choices = draw("core", 0, 2)

    def drive(perform: Any) -> None:
        from hkv.contract.registry import dialect_of

        dialect_of(header.dialect).drive(header, choices, perform, 6)

    performed, said = on_its_own(NumpyEngine, header, drive)
    assert said == f"no invariant is broken up to operation {len(performed)}"
