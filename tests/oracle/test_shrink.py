"""Shrinking keeps cases legal and failing, and makes them small."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.answer import Failure, Mismatch
from hkv.contract.case import Best, Case
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.vllm.engines.engine import attempt
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.explain.difference import difference
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log.structs import (
    AdvanceOp,
    AllocateOp,
    Allocation,
    CacheEvent,
    CacheState,
    ConnectorHit,
    ConnectorLookupOp,
    EventsOp,
    FreeOp,
    Header,
    Hit,
    LookupOp,
    RequestOp,
    ResetOp,
    StateOp,
    StepOp,
    TruncateOp,
)
from hkv.dialects.vllm.shrink_rules import _with_blocks_set_aside, _without_holders, repaired
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.errors import EngineTimeoutError, HKVError
from hkv.oracle import comparison
from hkv.oracle.broken_invariant import Broken, first_broken
from hkv.oracle.check import check_log
from hkv.oracle.log_file import read_log, write_log
from hkv.oracle.record import Only, differ, record
from hkv.oracle.shrink import TIMEOUTS, Shrinker
from tests.oracle import sample


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
        case = recording.case(parted)
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


class Fragile(NumpyEngine):
    """Fails over long chunks, and otherwise over short ones."""

    def allocate(self, operation: AllocateOp) -> Allocation:
        if operation.new > 4:
            raise ValueError(f"{operation.new} tokens of {operation.id}")
        if operation.new < 3:
            raise IndexError(operation.id)
        return super().allocate(operation)


class Forgetting(NumpyEngine):
    """Caches nothing."""

    def __init__(self, header: Header) -> None:
        super().__init__(msgspec.structs.replace(header, caching=False))


HEADER = sample.header(oplog=2, num_blocks=9)
TOKENS = [1, 2, 3, 4, 5]
OPERATIONS = (
    RequestOp(id="r1", tokens=TOKENS),
    RequestOp(id="r2", tokens=TOKENS),
    AllocateOp(id="r1", new=5, hit=0, lookahead=0, external=0, delay=False, must_fit=False, reserved=0, in_flight=0),
    LookupOp(id="r2"),
)


def test_a_failure_does_not_turn_into_another() -> None:
    shrinker = Shrinker(Fragile, NumpyEngine)
    case = shrinker.failing(HEADER, OPERATIONS)
    assert case is not None
    assert case.failure.startswith("ValueError: tokens of r at ")
    small = shrinker.shrink(case)
    assert small.failure == case.failure
    assert small.operations[-1].new == 5


def test_a_question_shows_a_difference_before_its_consequence() -> None:
    shrinker = Shrinker(Forgetting, NumpyEngine)
    case = shrinker.failing(HEADER, OPERATIONS)
    assert case is not None
    assert isinstance(case.operations[-1], LookupOp)
    asked = shrinker.seen_before(case)
    assert isinstance(asked.operations[-1], StateOp)
    assert difference(asked) == "block 1 of group 0, with the first 2 tokens of r1, is not cached"


def test_who_only_holds_blocks_goes_with_them() -> None:
    answers = (None, None, Allocation([[1, 2, 3]]), Hit(0, [[]], 0))
    tried = list(_without_holders(Best(Case(HEADER, OPERATIONS, answers, Mismatch("hit", 0, 1)))))
    assert tried == [
        (msgspec.structs.replace(HEADER, num_blocks=9 - count), [*OPERATIONS[1::2]]) for count in (3, 2, 1)
    ]


def test_blocks_that_somebody_only_holds_are_set_aside_instead() -> None:
    """Without the holder, the allocation finds as many blocks free as before, less one to eight."""
    last = msgspec.structs.replace(OPERATIONS[2], id="r2", new=4, reserved=1)
    operations = (*OPERATIONS, last)
    answers = (None, None, Allocation([[1, 2, 3]]), Hit(0, [[]], 0), Allocation(None))
    tried = list(_with_blocks_set_aside(Best(Case(HEADER, operations, answers, Mismatch("blocks", None, [[4]])))))
    without_r1 = [
        (HEADER, [*OPERATIONS[1::2], msgspec.structs.replace(last, reserved=1 + count)]) for count in (3, 2, 1, 0)
    ]
    assert tried[:4] == without_r1


def failing(engine: type, feature: str, seed: int, steps: int = 12) -> Case:
    """A case of a seed on which an engine is known to be wrong."""
    recording, parted = differ(engine, NumpyEngine, feature, seed, 2, steps)
    assert parted is not None
    return recording.case(parted)


def test_a_case_may_become_smaller_while_one_of_its_operations_is_being_simplified() -> None:
    """Operations left out make others move: here an advance to the place of a request, whose tokens are a list."""
    shrinker = Shrinker(Miser, NumpyEngine)
    small = shrinker.shrink(failing(Miser, "external", 9))
    assert shrinker.problem is None
    assert len(small.operations) <= 6


@pytest.mark.parametrize("error", [ZeroDivisionError("nothing to divide by"), KeyboardInterrupt()])
def test_an_error_ends_the_search_and_leaves_the_smallest_case_so_far(error: BaseException) -> None:
    case, left = failing(Optimist, "core", 0), list[int]()

    def progress(operations: int) -> None:
        left.append(operations)
        if len(left) == 10:
            raise error

    shrinker = Shrinker(Optimist, NumpyEngine, progress=progress)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            shrinker.shrink(case)
    else:
        assert shrinker.shrink(case) == shrinker.best
        assert str(shrinker.problem).startswith("ZeroDivisionError: nothing to divide by at ")
    assert shrinker.best is not None
    assert len(shrinker.best.operations) == left[-1] < len(case.operations)


def test_candidates_bound_the_search() -> None:
    case = failing(Optimist, "core", 0)
    few = Shrinker(Optimist, NumpyEngine, candidates=7)
    few.shrink(case)
    assert few.attempts == 7


class Deaf(NumpyEngine):
    """Does not answer a lookup that hits."""

    def lookup(self, id: str) -> Hit:
        found = super().lookup(id)
        if found.hit:
            raise EngineTimeoutError("engine", "silent for 10 seconds", "an answer")
        return found


def test_an_engine_that_hangs_is_not_waited_for_at_every_candidate() -> None:
    case = failing(Deaf, "core", 0)
    shrinker = Shrinker(Deaf, NumpyEngine)
    small = shrinker.shrink(case)
    assert shrinker.timeouts == TIMEOUTS
    assert small.fails
    assert len(small.operations) < len(case.operations)


class Hoarder(RtpNumpyEngine):
    """Under RTP-LLM's rules; says of every allocation after the first append that it failed."""

    appended = False

    def perform(self, operation: structs.RtpOp) -> structs.RtpAnswer:
        self.appended |= isinstance(operation, structs.AppendOp)
        answer = super().perform(operation)
        if self.appended and isinstance(answer, structs.Malloc):
            return msgspec.structs.replace(answer, verdict="internal_error")
        return answer


@pytest.mark.parametrize("dialect", NAMES)
def test_both_dialects_are_shrunk_by_the_same_search(dialect: str) -> None:
    only = Only(dialect=dialect)
    for seed in range(4):
        recording, parted = differ(Hoarder, RtpNumpyEngine, "core", seed, 2, 12, only=only)
        if parted is None:
            continue
        case = recording.case(parted)
        shrinker = Shrinker(Hoarder, RtpNumpyEngine)
        assert len(shrinker.shrink(case).operations) <= 5
        assert shrinker.problem is None


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
        case = recording.case(parted)
        small = Shrinker(Nervous, NumpyEngine).shrink(case)
        assert small.fails == case.fails
        assert isinstance(small.operations[-1], ResetOp if case.fails else LookupOp)


@pytest.mark.parametrize(
    ("eagle", "want", "got", "said"),
    [
        (False, [1, 2], [0, 2], "r2 finds no block at column 0 of group 0, where block 1 can be resumed from"),
        (True, [1], [], "where block 1 can be resumed from, as if drafts gave up more than the unit after a hit"),
        (False, [0, 2], [1, 2], "r2 finds block 1 at column 0 of group 0, where its hit has none"),
        (False, [1, 2], [1, 3], "r2 finds block 3 at column 1 of group 0, not block 2, which has its key"),
    ],
)
def test_blocks_of_a_hit_are_told_apart(eagle: bool, want: list[int], got: list[int], said: str) -> None:
    header = msgspec.structs.replace(HEADER, eagle=eagle)
    assert difference(Case(header, OPERATIONS, (None,) * 4, Mismatch("blocks[0]", want, got))).endswith(said)


def test_a_request_that_comes_back_is_said_to() -> None:
    again = (*OPERATIONS[:3], FreeOp(id="r1"), OPERATIONS[2])
    fails = difference(Case(HEADER, again, (None,) * 5, Mismatch("error", None, "AssertionError")))
    assert fails == "r1, which was preempted at operation 4 and has come back, is to get blocks: AssertionError"
    refused = difference(Case(HEADER, again, (None,) * 5, Mismatch("blocks", [[1]], None)))
    assert (
        refused == "r1, which was preempted at operation 4 and has come back, is refused, though what it needs is free"
    )


class Silent(NumpyEngine):
    """Tells of no event."""

    def events(self) -> list[CacheEvent]:
        return []


def test_what_the_right_engine_breaks_too_is_no_case_of_an_invariant() -> None:
    """A hit of what nobody computed is the operations' fault, whatever else an engine does wrong."""
    hit = msgspec.structs.replace(OPERATIONS[2], id="r2", new=1, hit=4)
    operations = (*OPERATIONS, hit, AdvanceOp(id="r2", tokens=5), StepOp(), EventsOp())
    shrinker = Shrinker(Silent, NumpyEngine)
    assert shrinker.failing(HEADER, operations) is not None
    shrinker.keeps = "shadow tags"
    assert shrinker.failing(HEADER, operations) is None
    for engine in (Silent, NumpyEngine):
        broken = first_broken(engine, HEADER, operations)
        assert isinstance(broken, Broken)
        assert broken.name == "shadow tags"


FOUND = ConnectorHit(hit=8, blocks=[[3, 4]], shared_prefix=0, diverged=False, hits=[8])


@pytest.mark.parametrize(
    ("before", "answer", "hit", "rows"),
    [
        (ConnectorLookupOp(id="r1"), FOUND, 8, [[3, 4]]),
        (ConnectorLookupOp(id="r1"), Hit(4, [[5]], 0), 4, [[5]]),
        (ConnectorLookupOp(id="r1"), ConnectorHit(12, [[5, 6, 7]], 0, False, [12]), 8, [[5, 6]]),
        (ConnectorLookupOp(id="r2"), FOUND, 0, None),
        (RequestOp(id="r2", tokens=[1]), None, 0, None),
    ],
)
def test_rows_that_are_given_are_those_of_the_lookup_before(before, answer, hit, rows) -> None:
    """Rows as they were may name blocks that hold nothing once other operations are left out."""
    lifecycle = Lifecycle(sample.header(oplog=4))
    lifecycle.follow(RequestOp(id="r1", tokens=[1] * 16))
    asked = msgspec.convert({**sample.ALLOCATE, "new": 4, "hit": 8, "rows": [[1, 2]]}, AllocateOp)
    for last in ((before, answer), (TruncateOp(rows=[[3, 4]], tokens=4), None)):
        performed = [before] if last[0] is before else [before, last[0]]
        fitted = repaired(asked, lifecycle, performed, [answer, None][: len(performed)])
        assert isinstance(fitted, AllocateOp)
        assert (fitted.hit, fitted.rows, fitted.hit + fitted.new) == (hit, rows, 12)


def test_an_invariant_that_both_engines_break_is_no_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a case may be one that breaks an invariant whichever engine performs it."""
    broken = Broken("index", 2, "lookup id=r1", "a problem", "a promise")
    monkeypatch.setattr(comparison, "first_broken", lambda *case: broken)
    monkeypatch.setattr(comparison, "on_its_own", lambda *case: ((), broken))
    (found,) = comparison.diff(Optimist, "numpy", features=["core"], seeds=20, version=2).found
    assert found.invariant is None
    assert "both engines break index" in str(found.broken)
    assert found.headline.startswith("r")
