"""vLLM's own pools of chunks under observation: by themselves, and under its scheduler. Skipped where it is absent."""

# pyright: reportMissingImports=false

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterator

import pytest

from hkv.contract import registry
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.installed import engine
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.oracle.record import Only, record

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def session(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A session that observes all pools of both tiers; its settings are the test's parameter."""
    session = Session(AttachSettings(folder=str(tmp_path), **request.param))
    detach = [registry.dialect_of(name).attach_all(session) for name in (structs.CHUNKS, NAME)]
    yield session
    for each in detach:
        each()
    session.close()


def driven(name: str, feature: str, seed: int) -> None:
    """Random traffic of an installed vLLM."""
    record(engine, feature, seed, 2, 12, Only(dialect=name))


PLACES = [(structs.CHUNKS, "lru"), (structs.CHUNKS, "arc"), (structs.CHUNKS, "threshold")]
PLACES += [(structs.OFFLOAD, feature) for feature in ("window", "groups", "states", "eagle", "tails")]


@pytest.mark.parametrize("session", [{"states": "all"}], indirect=True)
@pytest.mark.parametrize(("name", "feature"), PLACES)
def test_a_live_pool_is_recorded_whole(session: Session, name: str, feature: str, tmp_path: pathlib.Path) -> None:
    for seed in range(3):
        driven(name, feature, seed)
    session.close()
    logs = [read_log(path) for path in find_logs([str(tmp_path)])]
    wanted = {structs.CHUNKS: 3, **({NAME: 3} if name == structs.OFFLOAD else {})}
    assert collections.Counter(log.header.dialect for log in logs) == wanted
    told = {type(operation) for log in logs for operation in log.operations}
    assert told >= {structs.BeginOp, structs.StoreOp, structs.DoneOp, structs.EndOp, structs.StateOp}
    assert not any(check_log(log, engine_factory("numpy")) for log in logs)
    assert not (tmp_path / "refused.txt").exists()


@pytest.mark.parametrize("session", [{"mode": "shadow"}], indirect=True)
@pytest.mark.parametrize("planted", [False, True])
def test_an_engine_alongside_notices_what_leaves_out_of_turn(
    session: Session, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    if planted:
        monkeypatch.setattr(LRUCachePolicy, "on_request_finished", lambda *_: None)
    for seed in range(4):
        driven(structs.OFFLOAD, "window", seed)
    assert len(session.shadows) == 8
    assert sum(shadow.operations for shadow in session.shadows) > 100
    session.close()  # which compares the last states
    assert any(shadow.difference for shadow in session.shadows) == planted
