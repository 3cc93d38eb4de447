"""The compiled cache against the reference, operation by operation, under random traffic, and against recorded logs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.answer import Failure, Mismatch
from hkv.contract.log import describe
from hkv.contract.traffic import Choices, RandomChoices
from hkv.dialects.vllm.engines.engine import apply, attempt
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_header
from hkv.dialects.vllm.log.renaming import compare
from hkv.dialects.vllm.log.structs import Answer, Header, Operation
from hkv.dialects.vllm.rules.parameters import GroupField
from hkv.dialects.vllm.traffic.live import drive
from hkv.dialects.vllm.traffic.traffic import FEATURES, Perform, Traffic, draw_header
from hkv.oracle.check import check_log
from hkv.oracle.log_file import read_log
from hkv.spec import FullAttention, Mamba, spec_from_text, spec_to_log
from hkv.state.key_table import eviction_of
from hkv.state.state import EVICTED, NEVER_SEEN, NOT_RETAINED, RETIRED
from hkv.testing.strategies import HypothesisChoices
from tests.cache.build import config
from tests.reference.build import PLAIN

TAILS = ("partial", "speculative_state")
"""Features whose states are kept where chunks end."""

STEPS = 10


class DifferenceError(AssertionError):
    """The two engines answered differently."""


def engines_in_step(header: Header) -> tuple[JaxEngine, NumpyEngine, Callable[[Operation], Any]]:
    """Both engines, and a function that performs an operation on both and compares the answers."""
    compiled, reference = JaxEngine(header), NumpyEngine(header)

    def perform(operation: Operation) -> Answer:
        want, got = apply(reference, operation), apply(compiled, operation)
        mismatch = compare(want, got, header.oplog)
        if isinstance(mismatch, Mismatch):
            raise DifferenceError(
                f"{describe(operation)}: {mismatch.field}: {mismatch.want} but {mismatch.got}\n{header}"
            )
        return want

    return compiled, reference, perform


def lockstep(header: Header, choices: Choices) -> None:
    compiled, reference, perform = engines_in_step(header)
    (drive_tails if header.feature in TAILS else drive)(header, choices, perform, STEPS)
    assert compiled.evictions == reference.evictions
    assert compiled.num_free() == reference.num_free()
    compare_absences(compiled, reference)


ABSENCE = {NEVER_SEEN: "never seen", EVICTED: "evicted", RETIRED: "retired", NOT_RETAINED: "not retained"}
"""Names of the reasons for which the table has no block for a key."""


def request_results(compiled: JaxEngine) -> Callable[[int, Any], tuple[str, Any]]:
    """A function of a group and a key: the key's state, and the step and the group in which it was evicted."""
    compiled._flush()
    dispatcher = compiled._dispatcher
    table, columns = jax.device_get((dispatcher.state.table, dispatcher.parameters.groups[:, GroupField.COLUMN]))

    def result(group: int, key: Any) -> tuple[str, Any]:
        number = compiled._interner.find(key)
        if number is None:
            return "never seen", None
        value = int(table[number, columns[group]])
        said = "cached" if value > 0 else ABSENCE[EVICTED if value < NOT_RETAINED else value]
        return said, eviction_of(value, dispatcher.state.buckets.groups) if value < NOT_RETAINED else None

    return result


def compare_absences(compiled: JaxEngine, reference: NumpyEngine) -> None:
    """Both say the same of why a prefix is not cached, for the first few that came."""
    groups = [group for group, spec in enumerate(compiled.config.topology.specs) if spec.prefix_cacheable]
    result = request_results(compiled)
    for key in compiled._interner.keys[:6] if compiled.config.caching else ():
        want = [reference.absence(group, key) for group in groups]
        got = [result(group, key)[0] for group in groups]
        if want != got:
            raise DifferenceError(f"{key!r}: {want} but {got}")
        gone = [group for group, said in zip(groups, want, strict=True) if said == "evicted"]
        want = [reference.eviction(group, key) for group in gone]
        got = [result(group, key)[1] for group in gone]
        if want != got:
            raise DifferenceError(f"{key!r} evicted in step, for group {want} but {got}")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("version", [1, 2])
def test_random_traffic(feature: str, version: int) -> None:
    """In no example are there more requests than slots (`tests/slow/test_cache.py` has one): one program."""
    for seed in range(15):
        choices = RandomChoices(1003 * version + seed)
        lockstep(draw_header(choices, feature, version), choices)


@settings(max_examples=25)
@given(st.data(), st.sampled_from(FEATURES))
def test_shrinking_traffic(data: st.DataObject, feature: str) -> None:
    choices = HypothesisChoices(data)
    lockstep(draw_header(choices, feature, 2), choices)


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if feature != "retention"])
def test_retention_beside_other_features(feature: str) -> None:
    """Any interval, and hashes that look ahead: combinations that no feature's own traffic has."""
    for seed in range(4):
        choices = RandomChoices(seed)
        header = draw_header(choices, feature, 2)
        sparse = any(group["kind"] in ("sliding_window", "mamba") for group in header.groups)
        interval = choices.integer(0, 3) * header.scheduler_block_size if sparse else 0
        lockstep(msgspec.structs.replace(header, retention_interval=interval, hash_lookahead=seed % 2), choices)


class FailedError(Exception):
    """Both engines failed, as the defect has it."""


def headers_beyond_the_keys(groups: str, lookahead: int, bugs: list[str], seed: int) -> Header:
    entries = [spec_to_log(spec_from_text(text)) for text in groups.split(",")]
    header = draw_header(RandomChoices(seed), "lookahead_hash", 2)
    sizes = {"hash_block_size": 4, "scheduler_block_size": 4, "max_model_len": 64}
    return msgspec.structs.replace(header, groups=entries, hash_lookahead=lookahead, bugs=bugs, num_blocks=30, **sizes)


@pytest.mark.parametrize(
    "groups", ["swa:4:8", "swa:4:1", "mamba:4", "chunked:4:16", "chunked:4:8,swa:4:6", "full:4,mamba:4"]
)
def test_lookups_beyond_the_keys(groups: str) -> None:
    """Hashes that look far ahead leave blocks without keys; a defect makes lookups fail over them in both engines."""
    failed = set()
    for seed in range(6):
        bugs = ["finder-index-error"] if seed % 2 else []
        header = headers_beyond_the_keys(groups, 2 + seed % 3, bugs, seed)
        compiled, reference = JaxEngine(header), NumpyEngine(header)

        def perform(operation: Operation, compiled=compiled, reference=reference) -> Answer:
            want, got = attempt(reference, operation), attempt(compiled, operation)
            assert compare(want, got, 2) is None, describe(operation)
            if isinstance(want, Failure):
                assert "keys" in want.message
                assert "keys" in getattr(got, "message", "")
                raise FailedError
            return want

        try:
            drive(header, RandomChoices(seed), perform, STEPS)
        except FailedError:
            failed.add(bool(bugs))
    assert failed == ({True} if groups not in ("swa:4:1", "full:4,mamba:4") else set())


def test_a_state_left_behind_inside_a_block_is_registered_once() -> None:
    """A chunk leaves a state inside a block; the commit after it must find the state registered under its key.

    Random traffic commits an allocation again in one of eleven chunks, and leaves a state inside a block behind in one
    of six cases: the two meet in one seed of two hundred.
    """
    specs = (
        FullAttention(block_size=8),
        Mamba(block_size=16, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=4),
    )
    header = to_header(config(*specs, scheduler_block_size=16, partial_hits=True), "speculative_state")
    _, _, perform = engines_in_step(header)
    tokens = list(range(46))
    for name in ("a", "b"):
        perform(oplog.StepOp())
        perform(oplog.RequestOp(id=name, tokens=tokens))
        perform(oplog.AllocateOp(id=name, new=46, hit=0, **PLAIN))
        perform(oplog.AdvanceOp(id=name, tokens=46))
        first = perform(oplog.EventsOp())
        assert 1 in [event.num_blocks for event in first if event.group == 1]
        perform(oplog.CommitOp(id=name, tokens=46))
        assert perform(oplog.EventsOp()) == []
        perform(oplog.StateOp())
    perform(oplog.FreeOp(id="b"))
    assert perform(oplog.LookupOp(id="b")).hit == 44


def traffic(*features: str, seeds: int = 120) -> None:
    """Random traffic about some features, or about all: what planted defects are judged by (`tests/mutants`)."""
    features = features or FEATURES
    for seed in range(seeds):
        choices = RandomChoices(seed)
        turn, place = divmod(seed, len(features))
        lockstep(draw_header(choices, features[place], 1 + turn % 2), choices)


class Tails(Traffic):
    """Ends most chunks as vLLM 0.33's `Scheduler._mamba_block_aligned_split` would: blocks are kept partly filled."""

    _end = 0

    def _next_tokens(self, request: Any, start: int, drafts: bool = True) -> int:
        unit = self._header.hash_block_size
        last = (request.prompt if self._header.eagle else request.prompt - 1) // unit * unit
        last -= unit * self._header.eagle
        tail = start < last and self._choices.chance(60)
        new = last - start if tail else super()._next_tokens(request, start, drafts)
        self._end = start + new
        return new

    def _draw_boundary(self, request: Any, found: int) -> int:
        return self._end if self._choices.chance(30) else super()._draw_boundary(request, found)


def drive_tails(header: Header, choices: Choices, perform: Perform, steps: int) -> None:
    """As `hkv.dialects.vllm.traffic.live.drive`."""
    traffic = Tails(header, choices, perform)
    for _ in range(steps):
        traffic.step()
    traffic.drain()


ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LOGS = [
    path for feature in FEATURES for path in sorted((ROOT / "tests" / "data" / "oplogs").glob(f"*{feature}*.jsonl"))
]


def test_there_are_logs() -> None:
    assert len(LOGS) >= 12


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_own_logs(path: pathlib.Path) -> None:
    difference = check_log(read_log(path), JaxEngine)
    assert difference is None, difference.describe()


@pytest.mark.parametrize("feature", FEATURES)
def test_shared_logs(shared_dir: pathlib.Path, feature: str) -> None:
    paths = sorted((shared_dir / "oplogs").glob(f"{feature}-*.jsonl"))
    assert len(paths) == 24
    for path in paths:
        difference = check_log(read_log(path), JaxEngine)
        assert difference is None, difference.describe()
