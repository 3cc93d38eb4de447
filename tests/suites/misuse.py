"""Misuse: an operation that must not be asked raises an error that names what is wrong, and nothing changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import MappingProxyType

import msgspec

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Allocation, Header, Hit
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.errors import OperationError
from tests.reference.build import allocation
from tests.suites.suite import CaseSuite, case_check

FEATURES = ("core", "eagle", "context_parallel", "retention", "lookahead_hash")


@dataclasses.dataclass(frozen=True)
class Misuse:
    """A prompt is computed and freed, and sent again while another request runs; then something is asked wrongly.

    The pool holds everything; `wrong` is a key of `WRONG`.
    """

    header: Header
    length: int
    wrong: str

    operations = 9
    """Operations of the case: four for the first prompt, three for the other, an arrival and what is wrong."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{group['kind']}:{group['block_size']}" for group in self.header.groups)
        return f"[{kinds}] {self.length} tokens: {self.wrong}"


def draw_misuse(choices: Choices) -> Misuse:
    """A random case."""
    header = draw_header(choices, choices.pick(FEATURES), version=2)
    groups = [group | ({"cache_mode": "align"} if "cache_mode" in group else {}) for group in header.groups]
    header = msgspec.structs.replace(
        header, groups=groups, num_blocks=400, caching=True, prefill_lookahead=0, watermark=0.0, bugs=[]
    )
    unit = header.scheduler_block_size
    length = min(unit * choices.integer(1, 3) + choices.integer(0, 1), header.max_model_len - 2)
    return Misuse(header, max(2, length), choices.pick(tuple(WRONG)))


def story(case: Misuse) -> NumpyEngine:
    """The engine before anything is asked wrongly: `again` waits, with a prompt that is cached; `other` runs."""
    engine, prompt = NumpyEngine(case.header), [1] * case.length
    for id, tokens in (("first", prompt), ("other", [2] * case.length)):
        apply(engine, oplog.RequestOp(id=id, tokens=tokens))
        apply(engine, allocation(id, case.length))
        apply(engine, oplog.AdvanceOp(id=id, tokens=case.length - 1))
        apply(engine, oplog.CopiesOp())
        apply(engine, oplog.StepOp())
    apply(engine, oplog.FreeOp(id="first"))
    apply(engine, oplog.RequestOp(id="again", tokens=prompt))
    return engine


Wrong = Callable[[NumpyEngine, Misuse], oplog.Operation | None]
"""Asks what is still right, and returns what is wrong; None where there is nothing wrong to ask."""


def _after(*between: oplog.Operation) -> Wrong:
    """A hit is adopted that something came after: it may be gone."""

    def ask(engine: NumpyEngine, case: Misuse) -> oplog.Operation | None:
        found = engine.lookup("again")
        for operation in between:
            apply(engine, operation)
        return allocation("again", 1, found.hit) if found.hit else None

    return ask


def _evicted(engine: NumpyEngine, case: Misuse) -> oplog.Operation | None:
    found = engine.lookup("again")
    apply(engine, oplog.EvictOp(blocks=sorted({block for row in found.blocks for block in row if block})))
    return allocation("again", 1, found.hit) if found.hit else None


def _longer(engine: NumpyEngine, case: Misuse) -> oplog.Operation | None:
    found = apply(engine, oplog.LookupOp(id="again"))
    assert isinstance(found, Hit)
    return allocation("again", 1, found.hit + case.header.scheduler_block_size)


def _anothers(engine: NumpyEngine, case: Misuse) -> oplog.Operation | None:
    apply(engine, oplog.RequestOp(id="third", tokens=[1] * case.length))
    found = engine.lookup("third")
    return allocation("again", 1, found.hit) if found.hit else None


def _plain(operation: oplog.Operation) -> Wrong:
    return lambda engine, case: operation


WRONG: MappingProxyType[str, Wrong] = MappingProxyType(
    {
        "a hit that was evicted": _evicted,
        "a hit before another one was granted blocks": _after(allocation("other", 1)),
        "a hit before another one was freed": _after(oplog.FreeOp(id="other")),
        "a hit before another one was registered": _after(oplog.CommitOp(id="other", tokens=1)),
        "a hit before copies were taken": _after(oplog.CopiesOp()),
        "a hit before the cache was reset": _after(oplog.FreeOp(id="other"), oplog.ResetOp()),
        "a hit longer than it was": _longer,
        "a hit that another one found": _anothers,
        "a hit of a running request": _plain(allocation("other", 1, 1)),
        "external tokens of a running request": _plain(allocation("other", 1, external=1)),
        "nothing": _plain(allocation("other", 0)),
        "less than nothing": _plain(allocation("other", -1)),
        "more in flight than there can be": _plain(allocation("other", 1, in_flight=-1)),
        "an unknown request": _plain(allocation("nobody", 1)),
        "the same request again": _plain(oplog.RequestOp(id="other", tokens=[1])),
        "a request without tokens": _plain(oplog.RequestOp(id="empty", tokens=[])),
        "to register what is not computed": lambda engine, case: oplog.CommitOp(id="other", tokens=case.length),
        "to register for a waiting request": _plain(oplog.CommitOp(id="again", tokens=0)),
        "to compute without room": _plain(oplog.AdvanceOp(id="other", tokens=2)),
        "to compute backwards": _plain(oplog.AdvanceOp(id="other", tokens=-1)),
        "to look up a running request": _plain(oplog.LookupOp(id="other")),
        "to free a waiting request": _plain(oplog.FreeOp(id="again")),
        "to forget a running request": _plain(oplog.DropOp(id="other")),
        "to evict a block that does not exist": lambda engine, case: oplog.EvictOp(blocks=[1, case.header.num_blocks]),
        "to evict from the other end": _plain(oplog.EvictOp(blocks=[1, -1])),
    }
)
"""Misuses by name, and the operation that asks for each."""


@case_check("misuse", "B-I24", "B-I28", "B-I33")
def misuse(case: Misuse) -> Iterator[str]:
    """An operation that must not be asked is refused, and changes nothing: stale hits, other states, no such block."""
    engine = story(case)
    wrong = WRONG[case.wrong](engine, case)
    if wrong is None:
        return
    before = engine.state()
    try:
        answer = apply(engine, wrong)
    except OperationError:
        if engine.state() != before:
            yield f"{case.wrong} was refused, and changed the cache"
    else:
        yield f"{case.wrong} was answered with {answer}"


@case_check("no trace", "B-I32")
def no_trace(case: Misuse) -> Iterator[str]:
    """A request that is refused, or finds nothing, and is dropped leaves nothing under its name, not even a row."""
    engine = story(case)
    found = engine.lookup("again")
    operation = allocation("again", case.length - found.hit, found.hit)
    answer = apply(engine, msgspec.structs.replace(operation, reserved=case.header.num_blocks))
    assert isinstance(answer, Allocation)
    if answer.blocks is not None:
        yield f"granted, though all {case.header.num_blocks} blocks are set aside"
        return
    apply(engine, oplog.DropOp(id="again"))
    for kind in engine.manager.cache.kinds:
        if "again" in kind.rows:
            yield f"group {kind.group} still has the row {kind.rows['again']} of a request that was forgotten"


SUITE = CaseSuite(
    "misuse", "the reference manager when it is asked what must not be asked", draw_misuse, (misuse, no_trace)
)
