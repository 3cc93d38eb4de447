"""Shrinking keeps cases legal and failing, and makes them small."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.errors import HKVError
from hkv.oracle.check import check_log
from hkv.oracle.engine import Failure, attempt
from hkv.oracle.engines.numpy import NumpyEngine
from hkv.oracle.lifecycle import Lifecycle
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.oplog import AllocateOp, Allocation, CacheState, Header, Hit, LookupOp, ResetOp
from hkv.oracle.record import differ, record
from hkv.oracle.repair import repaired
from hkv.oracle.shrink import Case, Shrinker
from hkv.testing.traffic import FEATURES


class Optimist(NumpyEngine):
    """Hits one token more."""

    def lookup(self, id: str) -> Hit:
        found = super().lookup(id)
        return Hit(found.hit + 1, found.blocks, found.shared_prefix) if found.hit else found


class Miser(NumpyEngine):
    """Refuses what would leave no block free."""

    def allocate(self, operation: AllocateOp) -> Allocation:
        answer = super().allocate(msgspec.structs.replace(operation, reserved=operation.reserved + 1))
        return answer


class Forgetful(NumpyEngine):
    """Does not say that it gave a reference back."""

    def state(self) -> CacheState:
        state = super().state()
        return msgspec.structs.replace(state, refs=dict.fromkeys(state.refs, 1))


WRONG = [(Optimist, "core", 4), (Optimist, "partial", 5), (Miser, "eagle", 4), (Forgetful, "core", 8)]


@pytest.mark.parametrize(("engine", "feature", "most"), WRONG)
def test_small_cases_of_known_defects(engine: type, feature: str, most: int, tmp_path: pathlib.Path) -> None:
    small = []
    for seed in range(40):
        recording, parted = differ(engine, NumpyEngine, feature, seed, 2, 8)
        if parted is None:
            continue
        left: list[int] = []
        shrinker = Shrinker(engine, NumpyEngine, progress=left.append)
        case = Case(recording.header, tuple(recording.operations), tuple(recording.answers), parted.mismatch)
        case = shrinker.shrink(case)
        path = tmp_path / f"{seed}.jsonl"
        write_log(path, case.header, case.operations, case.answers)
        log = read_log(path)
        assert check_log(log, NumpyEngine) is None
        difference = check_log(log, engine)
        assert difference is not None
        assert difference.line == len(log.operations) + 1
        assert len(left) == shrinker.attempts
        assert left[-1] == len(case.operations)
        small.append(len(case.operations))
        if len(small) == 3:
            break
    assert small
    assert min(small) <= most
    assert max(small) <= 12


def test_engines_that_agree_have_no_case() -> None:
    recording = record(NumpyEngine, "core", 1, 2, 4)
    assert Shrinker(NumpyEngine, NumpyEngine).failing(recording.header, recording.operations) is None


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_left_out_repairs_to_legal_traffic(data: st.DataObject) -> None:
    seed, feature = data.draw(st.integers(0, 30)), data.draw(st.sampled_from(FEATURES))
    recording = record(NumpyEngine, feature, seed, 2, 6)
    keep = data.draw(st.lists(st.booleans(), min_size=len(recording.operations), max_size=len(recording.operations)))
    header: Header = recording.header
    lifecycle, engine = Lifecycle(header), NumpyEngine(header)
    performed, answers = [], []
    for wanted, kept in zip(recording.operations, keep, strict=True):
        operation = repaired(wanted, lifecycle, performed, answers) if kept else None
        if operation is None:
            continue
        try:
            lifecycle.follow(operation)
        except HKVError:
            continue
        answer = attempt(engine, operation)
        assert not isinstance(answer, Failure) or header.bugs, answer
        if isinstance(answer, Failure):
            return
        lifecycle.answered(operation, answer)
        performed.append(operation)
        answers.append(answer)
    if all(keep):
        assert performed == recording.operations


class Nervous(NumpyEngine):
    """Hits one token more, and cannot be reset."""

    def lookup(self, id: str) -> Hit:
        found = super().lookup(id)
        return Hit(found.hit + 1, found.blocks, found.shared_prefix) if found.hit else found

    def reset(self) -> bool:
        raise RuntimeError("cannot reset")


def test_a_wrong_answer_does_not_become_a_failure() -> None:
    for seed in range(8):
        recording, parted = differ(Nervous, NumpyEngine, "core", seed, 2, 10)
        if parted is None:
            continue
        case = Case(recording.header, tuple(recording.operations), tuple(recording.answers), parted.mismatch)
        small = Shrinker(Nervous, NumpyEngine).shrink(case)
        assert small.fails == case.fails
        assert isinstance(small.operations[-1], ResetOp if case.fails else LookupOp)
