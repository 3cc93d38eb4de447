"""Live caches of SGLang 0.5.23 under observation: their trees in Rust and in Python, beside each other and HKV's."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hkv.contract import registry
from hkv.contract.traffic import RandomChoices
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.engines.installed import InstalledSGLangEngine, RustSGLangEngine
from hkv.dialects.sglang.traffic import FEATURES
from hkv.errors import ConfigError
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.testing.planting import applied
from tests.mutants.catalogue import IN_PACKAGES
from tests.sglang.test_dialect import entered, header

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.sglang

DIALECT = registry.dialect_of(structs.NAME)
LIVE = {"python": InstalledSGLangEngine, "rust": RustSGLangEngine}


@pytest.fixture(autouse=True, scope="module")
def _importable() -> None:
    """Stands in for what a server has installed, before anything of SGLang is imported."""
    importlib.import_module("hkv.dialects.sglang.engines.sglang_objects")


NARROW = "narrow"
"""Windows of two or three tokens in small pools of one-token pages: matches end right behind a window, or a token short
of one, in every few seeds."""


def drawn(choices: RandomChoices, feature: str) -> structs.Header:
    """The configuration of a cache under observation: of a feature of the dialect's traffic, or `NARROW`."""
    if feature == NARROW:
        return header(choices.integer(6, 14), window=choices.pick((2, 3)), bugs=sorted(BUGS))
    return DIALECT.draw_header(choices, feature, 2, structs.NAME)


def drive(session: Session, live: str, features: tuple[str, ...] = FEATURES, seeds: int = 4, steps: int = 12) -> int:
    """Random traffic through caches under observation; the operations that were compared, up to a difference."""
    compared = 0
    for feature in features:
        for seed in range(seeds):
            choices = RandomChoices(seed)
            engine = LIVE[live](drawn(choices, feature))
            observed = DIALECT.attach(engine.params, session)
            DIALECT.drive(engine.header, choices, engine.perform, steps)
            compared += sum(shadow.operations for shadow in session.shadows[-1:])
            observed.close()
            if any(shadow.difference for shadow in session.shadows[-1:]):
                return compared
    return compared


@pytest.mark.parametrize(("live", "beside"), [("rust", "numpy"), ("python", "numpy"), ("rust", "sglang")])
def test_a_live_tree_is_what_is_beside_it(live: str, beside: str, tmp_path: pathlib.Path) -> None:
    session = Session(AttachSettings(folder=str(tmp_path), mode="shadow", engine=beside, states="all"))
    assert drive(session, live) > 500
    assert not any(shadow.difference for shadow in session.shadows)
    session.close()


def test_a_live_tree_s_log_is_judged_by_every_engine(tmp_path: pathlib.Path) -> None:
    session = Session(AttachSettings(folder=str(tmp_path), states="digest"))
    drive(session, "python", seeds=2)
    session.close()
    logs = [read_log(path) for path in find_logs([tmp_path])]
    assert len(logs) == 2 * len(FEATURES)
    for log in logs:
        assert isinstance(log.operations[-1], structs.StateOp)
        for engine in ("numpy", "sglang", "sglang-rust"):
            assert check_log(log, engine_factory(engine)) is None


SEEN = (
    *("hit-one-token-behind-a-window", "tombstone-keeps-the-run", "split-forgets-full-locks", "mark-stays-below"),
    *("recency-without-the-page", "leaf-not-cut-to-a-window", "duplicates-kept", "hits-counted-twice"),
    *("locked-tombstone-takes-full-slots", "held-leaf-leaves", "parent-never-leaves", "window-lock-one-node-long"),
)
"""Defects that are planted in a tree; others of the catalogue are in allocators, or in what drives the tree."""


@pytest.mark.parametrize("name", SEEN)
def test_a_defect_planted_in_a_live_tree_is_noticed(name: str, tmp_path: pathlib.Path) -> None:
    (row,) = [row for row in IN_PACKAGES["sglang"] if row.name == name]
    settings = AttachSettings(folder=str(tmp_path), mode="shadow", states="all")
    session = Session(settings)
    with applied(*row.edits):
        with contextlib.suppress(AssertionError, KeyError):  # SGLang's own, once its tree is wrong
            drive(session, "python", (NARROW, "window", "full"), seeds=80, steps=24)
        shadow = session.shadows[-1]
        assert shadow.difference is not None
        (path,) = find_logs([tmp_path])
        log = read_log(path)
        found = check_log(log, engine_factory("sglang"))
    session.close()
    assert found is not None
    assert (found.line, found.field) == (shadow.difference.line, shadow.difference.field)
    for right in ("numpy", "sglang", "sglang-rust"):
        assert check_log(log, engine_factory(right)) is None


def test_what_a_log_has_no_words_for_ends_it(tmp_path: pathlib.Path) -> None:
    session = Session(AttachSettings(folder=str(tmp_path)))
    engine = InstalledSGLangEngine(header(bugs=sorted(BUGS)))
    DIALECT.attach(engine.params, session)
    for operation in entered("a", [0, 1, 2, 3]):
        engine.perform(operation)
    engine._cache.tree_core.inc_full_pin(engine._cache.root_node_handle())
    engine.perform(structs.MatchOp(tokens=[0]))
    session.close()
    (path,) = find_logs([tmp_path])
    log = read_log(path)
    assert check_log(log, engine_factory("numpy")) is None
    assert "inc_full_pin" in DIALECT.ended(log)


@pytest.mark.parametrize(
    ("changes", "field"), [({"disable": True}, "disable"), ({"eviction_policy": "tlru"}, "policy")]
)
def test_a_cache_that_a_log_has_no_words_for_is_refused(
    changes: dict[str, Any], field: str, tmp_path: pathlib.Path
) -> None:
    engine = InstalledSGLangEngine(header(bugs=sorted(BUGS)))
    for name, value in changes.items():
        setattr(engine.params, name, value)
    with pytest.raises(ConfigError) as error:
        DIALECT.attach(engine.params, Session(AttachSettings(folder=str(tmp_path))))
    assert error.value.argument == field


def by_the_plugin(settings: str, engine: str = "rust") -> subprocess.CompletedProcess[str]:
    """A request through a cache of a process of its own, which the plugin observes, and what SGLang's process has of
    its own beside it."""
    script = (
        "import logging\n"
        "import hkv.dialects.sglang.engines.sglang_objects\n"  # stands in for what a server has installed
        "from hkv.dialects.sglang import plugin\n"
        f"from hkv.dialects.sglang.engines.installed import {engine} as live\n"
        "from tests.sglang.test_dialect import entered, header\n"
        "from hkv.dialects.sglang.config import BUGS\n"
        "from sglang.srt.runtime_context import get_server_args\n"
        "plugin.register()\n"
        "engine = live(header(bugs=sorted(BUGS)))\n"
        "logging.getLogger('sglang').setLevel(logging.INFO)\n"
        "arguments = get_server_args()\n"
        "[engine.perform(each) for each in entered('a', [0, 1, 2, 3])]\n"
        "assert get_server_args() is arguments\n"
        "assert logging.getLogger('sglang').level == logging.INFO\n"
    )
    environment = {**os.environ, "HKV_ATTACH": settings}
    return subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_every_cache_of_a_process_is_observed(tmp_path: pathlib.Path) -> None:
    """By the plugin, in a process of its own."""
    ran = by_the_plugin(str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "hkv: SGLang's prefix caches are recorded to" in ran.stderr
    (path,) = find_logs([tmp_path])
    log = read_log(path)
    assert any(isinstance(operation, structs.InsertOp) for operation in log.operations)
    assert check_log(log, engine_factory("numpy")) is None


@pytest.mark.parametrize(("live", "beside"), [("rust", "sglang"), ("python", "sglang-rust")])
def test_a_process_is_as_it_was_beside_sglang_s_own_tree(live: str, beside: str, tmp_path: pathlib.Path) -> None:
    """The tree beside a live one is made of the classes that are observed, and by a configuration of its own."""
    settings = AttachSettings(folder=str(tmp_path), mode="shadow", engine=beside, states="all")
    ran = by_the_plugin(settings.variable(), live)
    assert ran.returncode == 0, ran.stderr
    assert f"held against engine {beside}" in ran.stderr
    assert "differs" not in ran.stderr
    assert not list(tmp_path.iterdir())


def in_chunks(session: Session, live: str, states: int) -> int:
    """Two prompts in chunks, each of which enters a state, through a cache that has few; the operations compared."""
    given = header(40, window=5, bugs=sorted(BUGS))
    given.groups.append({"kind": "mamba", "block_size": 1})
    given.num_blocks.append(states)
    engine = LIVE[live](given)
    observed = DIALECT.attach(engine.params, session)
    for id, tokens in (("a", list(range(8))), ("b", [0, 1, 2, 3, 9, 9, 9, 9])):
        engine.perform(structs.AdmitOp(id=id, tokens=tokens))
        for length in (4, 6, 7, 8):
            if length > engine._requests[id].computed:
                engine.perform(structs.ExtendOp(id=id, length=length))
                engine.perform(structs.CheckpointOp(id=id))
        engine.perform(structs.FinishOp(id=id))
    compared = sum(shadow.operations for shadow in session.shadows[-1:])
    observed.close()
    return compared


@pytest.mark.parametrize("live", LIVE)
def test_a_lock_s_part_on_the_state_is_given_back_alone(
    live: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `extra_buffer_lazy`, where an allocation finds no free state."""
    from sglang.srt.mem_cache.unified_cache.components import mamba

    lazy = SimpleNamespace(enable_mamba_extra_buffer_lazy=True, mamba_max_states_per_path=-1)
    monkeypatch.setattr(mamba, "get_exec", lambda: SimpleNamespace(mamba=lazy))
    for beside in ("numpy", "sglang", "sglang-rust"):
        session = Session(AttachSettings(folder=str(tmp_path), mode="shadow", engine=beside, states="all"))
        assert min(in_chunks(session, live, states) for states in (2, 3, 4)) > 40
        assert not any(shadow.difference for shadow in session.shadows)
        session.close()
    recorded = Session(AttachSettings(folder=str(tmp_path)))
    for states in (2, 3, 4):
        in_chunks(recorded, live, states)
    recorded.close()
    logs = [read_log(path) for path in find_logs([tmp_path])]
    assert all(any(isinstance(each, structs.ReleaseStateOp) for each in log.operations) for log in logs)
    assert not any(DIALECT.ended(log) for log in logs)
    for engine in ("numpy", "sglang", "sglang-rust"):
        assert all(check_log(log, engine_factory(engine)) is None for log in logs)


def test_nothing_follows_the_end_of_a_log(tmp_path: pathlib.Path) -> None:
    """The tree was changed in a way that a log has no words for, and no state tells of it."""
    session = Session(AttachSettings(folder=str(tmp_path), states="all"))
    engine = InstalledSGLangEngine(header(bugs=sorted(BUGS)))
    DIALECT.attach(engine.params, session)
    for operation in entered("a", [0, 1, 2, 3]):
        engine.perform(operation)
    engine._cache.tree_core.inc_full_pin(engine._cache.root_node_handle())
    session.close()
    (path,) = find_logs([tmp_path])
    log = read_log(path)
    assert isinstance(log.operations[-2], structs.StateOp)
    assert "inc_full_pin" in DIALECT.ended(log)
    assert check_log(log, engine_factory("numpy")) is None
