"""Observation of a live tree, with a stand-in for SGLang's core: what a log is told, and how nodes are read."""

from __future__ import annotations

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hkv.contract import registry
from hkv.contract.attach import observe_share
from hkv.contract.log import Log
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.attach import CoreObserver
from hkv.dialects.sglang.config import COMPONENTS, FULL, MAMBA, SWA
from hkv.dialects.sglang.engines import live_tree
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.dialects.sglang.engines.tree import SGLangNumpyTree
from hkv.errors import OperationError
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.oracle.attach.sink import ShadowSink
from hkv.oracle.check import check_log
from hkv.oracle.record import Only, record
from tests.sglang.test_dialect import header

DIALECT = registry.dialect_of(structs.NAME)


@dataclasses.dataclass(frozen=True)
class Component:
    name: str


TYPES = {name: Component(name) for name in COMPONENTS}


class Core:
    """SGLang's core as far as locks go: nothing is done, and nothing is freed by it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: Nothing()

    def inc_lock_ref(self, node: int, skipped: Any = ()) -> Any:
        return receipt(skipped)


class Nothing:
    device_frees: dict[Any, Any] = {}  # noqa: RUF012
    cache_actions: tuple[Any, ...] = ()


def receipt(skipped: Any = (), mark: int | None = 1) -> Any:
    return SimpleNamespace(skipped_lock_components=tuple(skipped), component_lock_uuids={TYPES[SWA]: mark})


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.closed = False

    def calls_to(self, perform: Any) -> Any:
        return perform

    def step_ends(self) -> None:
        pass

    def begin(self, header: Any) -> None:
        pass

    def operation(self, operation: Any, answer: Any) -> None:
        assert not self.closed
        self.lines.append(" ".join([operation.__struct_config__.tag, getattr(operation, "id", "")]).strip())

    def close(self) -> None:
        self.closed = True


def observed(states: str = "none", core: Any = None) -> tuple[Any, Told]:
    given = header(8, window=2, bugs=[], tree=True)
    given.groups.append({"kind": "mamba", "block_size": 1})
    given.num_blocks.append(9)
    told = Told()
    observer = CoreObserver(given, SimpleNamespace(token_to_kv_pool_allocator=None), told, states)
    core = observer.hook(core or Core())
    observer._named.add(7)
    return core, told


OTHERS = [TYPES[FULL], TYPES[SWA]]
STATE = [TYPES[MAMBA]]


def test_a_lock_s_part_on_the_state_is_given_back_alone() -> None:
    """As an allocation does under `extra_buffer_lazy`; what is left of the lock is undone later, and once."""
    core, told = observed()
    core.inc_lock_ref(7)
    core.dec_lock_ref(7, receipt(OTHERS))
    core.dec_lock_ref(7, receipt(STATE))
    assert told.lines == ["lock l1", "release_state l1", "unlock l1"]
    core.inc_lock_ref(7)
    core.dec_lock_ref(7, receipt(OTHERS))
    core.dec_swa_lock_only(7, receipt(STATE))
    core.dec_lock_ref(7, receipt(STATE), True)
    assert told.lines[3:] == ["lock l2", "release_state l2", "release_window l2", "unlock l2"]


def test_a_lock_that_leaves_the_state_out_is_one_whose_part_was_given_back() -> None:
    """`SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK`."""
    core, told = observed()
    core.inc_lock_ref(7, STATE)
    core.inc_lock_ref(7)
    core.dec_lock_ref(7, receipt())
    core.dec_lock_ref(7, receipt(STATE))
    assert told.lines == ["lock l1", "release_state l1", "lock l2", "unlock l2", "unlock l1"]


@pytest.mark.parametrize("skipped", [OTHERS, [TYPES[FULL]]])
def test_a_lock_without_full_slots_ends_the_log(skipped: Any) -> None:
    core, told = observed()
    core.inc_lock_ref(7, skipped)
    assert told.lines == ["ended"]
    assert told.closed


def test_nothing_is_told_after_the_end_of_a_log() -> None:
    """Not even a state, which follows every other operation."""

    class Shown(Core):
        lru_lists = None

    core, told = observed("all", Shown())
    core.inc_full_pin(7)
    core.inc_lock_ref(7)
    assert told.lines == ["ended"]
    assert told.closed


def test_a_state_s_lock_is_counted_once() -> None:
    given = header(9, bugs=[], tree=True)
    given.groups.append({"kind": "mamba", "block_size": 1})
    given.num_blocks.append(9)
    tree = SGLangNumpyTree(given)
    tree.perform(structs.InsertOp(node=1, tokens=[1, 2], slots=[1, 2], state=3))
    tree.perform(structs.LockOp(id="a", node=1))
    for operation, locks in [
        (structs.ReleaseStateOp(id="a"), [1, 0]),
        (structs.LockOp(id="b", node=1), [2, 1]),
        (structs.UnlockOp(id="a"), [1, 1]),
        (structs.UnlockOp(id="b"), [0, 0]),
    ]:
        tree.perform(operation)
        (node,) = tree.perform(structs.StateOp()).nodes
        assert node.locks == locks
    with pytest.raises(OperationError, match="held"):
        tree.perform(structs.ReleaseStateOp(id="a"))


def test_caches_of_the_engine_beside_a_live_one_are_not_observed(tmp_path: pathlib.Path) -> None:
    """An installed engine makes caches of the very class of which every one is observed."""
    session = Session(AttachSettings(folder=str(tmp_path), mode="shadow"))
    seen: list[str] = []

    class Made(SGLangNumpyTree):
        def __init__(self, given: structs.Header) -> None:
            observe_share(session, "made", lambda: seen.append("made"))
            super().__init__(given)

        def perform(self, operation: structs.Operation) -> Any:
            observe_share(session, "asked", lambda: seen.append("asked"))
            return super().perform(operation)

    sink = session.sink(DIALECT)
    assert isinstance(sink, ShadowSink)
    sink._factory = Made
    sink.begin(header(tree=True, bugs=[]))
    sink.operation(structs.ResetOp(), None)
    assert not seen
    observe_share(session, "live", lambda: seen.append("live"))
    assert seen == ["live"]
    session.close()


def test_a_log_of_an_engine_without_its_tree_is_met_by_any_tree() -> None:
    class Hidden(SGLangNumpyEngine):
        lacks = ("tree",)

        def perform(self, operation: structs.Operation) -> Any:
            return DIALECT.without(super().perform(operation), frozenset(self.lacks))

    found = record(Hidden, "window", 0, 2, 12, Only(dialect=structs.NAME))
    answered = zip(found.operations, found.answers, strict=True)
    operations = [
        msgspec.structs.replace(operation, want=answer) if answer is not None else operation
        for operation, answer in answered
    ]
    states = [answer for answer in found.answers if isinstance(answer, structs.State)]
    assert states
    assert all(state.nodes is None for state in states)
    log = Log("hand", found.header, tuple(operations))
    for engine in (SGLangNumpyEngine, Hidden):
        assert check_log(log, engine) is None
    # An engine that keeps its tree to itself without saying so is none that shows the right one.
    shown = SGLangNumpyEngine(found.header).perform(structs.StateOp())
    mismatch = DIALECT.compare(shown, DIALECT.without(shown, frozenset(["tree"])), 2)
    assert mismatch is not None
    assert mismatch.field == "nodes"


def test_an_engine_beside_a_live_one_is_asked_for_what_it_has(tmp_path: pathlib.Path) -> None:
    """A live tree in Python beside one in Rust, whose nodes nobody sees."""

    class Hidden(SGLangNumpyTree):
        lacks = ("tree",)

        def perform(self, operation: structs.Operation) -> Any:
            return DIALECT.without(super().perform(operation), frozenset(self.lacks))

    session = Session(AttachSettings(folder=str(tmp_path), mode="shadow"))
    sink = session.sink(DIALECT)
    assert isinstance(sink, ShadowSink)
    sink._factory = Hidden
    sink.begin(header(tree=True, bugs=[]))
    sink.operation(structs.StateOp(), structs.State([], [], {}, [], []))
    assert sink.difference is None
    session.close()


def core_of(full: Any) -> Any:
    """A core of full attention alone, whose tree has one node with these slots."""
    root = SimpleNamespace(id=0, last_access_time=0)
    node = SimpleNamespace(id=1, parent=root, children={}, hit_count=0, priority=0, last_access_time=1, creation_time=1)
    node.key = SimpleNamespace(extra_key=None, cache_salt=None, token_ids=[5, 6])
    node.component_data = {Component(FULL): SimpleNamespace(value=full, lock_ref=0, metadata={})}
    root.children = {0: node}
    return SimpleNamespace(root_node=root, components_by_type=node.component_data, lru_lists={})


def test_a_node_without_full_slots_is_read_as_it_is() -> None:
    config = structs.to_config(header(8, bugs=[]))
    (node,), orders = live_tree.tree(core_of(None), config)
    assert (node.tokens, node.slots, orders) == ([5, 6], [], [])
    (node,), _ = live_tree.tree(core_of(np.array([3, 4])), config)
    assert node.slots == [3, 4]
