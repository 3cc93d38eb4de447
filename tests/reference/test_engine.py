"""The reference as an engine, and what recorded logs of vLLM 0.33.0 say to it."""

import types

import pytest

from hkv.dialects.vllm.engines import numpy
from hkv.dialects.vllm.engines.engine import Engine, KeyedEngine
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.errors import ConfigError, HKVError
from hkv.oracle.check import check_log
from hkv.oracle.log_file import read_log
from tests.oracle import sample
from tests.reference.build import allocation

FEATURES = (
    "core",
    "eagle",
    "context_parallel",
    "external",
    "retention",
    "partial",
    "lookahead_hash",
    "speculative_state",
)


def header(version: int = 2) -> Header:
    groups = [{"kind": "full_attention", "block_size": 4}]
    return sample.header(oplog=version, num_blocks=6, groups=groups, hash_block_size=4, scheduler_block_size=4)


@pytest.mark.parametrize("feature", FEATURES)
def test_recorded_logs_agree(shared_dir, feature):
    logs = sorted((shared_dir / "oplogs").glob(f"{feature}-*.jsonl"))
    assert logs
    differences = [check_log(read_log(str(path)), numpy.NumpyEngine) for path in logs]
    assert [str(difference) for difference in differences if difference is not None] == []


def test_it_is_an_engine():
    engine = numpy.NumpyEngine(header())
    assert isinstance(engine, Engine)
    assert isinstance(engine, KeyedEngine)


def test_version_2_names_keys_and_parents():
    engine = numpy.NumpyEngine(header())
    engine.request("a", range(9), None)
    assert engine.allocate(allocation("a", 9)).blocks == [[1, 2, 3]]
    (stored,) = engine.events()
    keys = [key[:8].hex() for key in engine.manager.requests["a"].keys]
    assert (stored.keys, stored.parent, stored.num_blocks) == (keys, "", 2)
    engine.advance("a", 9)
    engine.append("a", [1, 2, 3])
    engine.allocate(allocation("a", 3))
    (stored,) = engine.events()
    assert stored.parent == keys[-1]
    engine.free("a")
    engine.evict([1])
    (removed,) = engine.events()
    assert (removed.type, removed.keys) == ("removed", keys[:1])
    assert engine.reset()
    (cleared,) = engine.events()
    assert (cleared.type, cleared.group) == ("cleared", -1)


def test_version_1_knows_neither():
    engine = numpy.NumpyEngine(header(version=1))
    engine.request("a", range(9), None)
    engine.allocate(allocation("a", 9))
    engine.free("a")
    engine.reset()
    (stored,) = engine.events()
    assert (stored.keys, stored.parent, stored.tokens) == (None, None, list(range(8)))


def test_state_lists_everything():
    engine = numpy.NumpyEngine(header())
    engine.request("a", range(5), ExtraKeys(salt="s", lora=["n", "/p"], multimodal=[("i", 1, 2)], embeds=["00ff"] * 5))
    engine.request("b", range(5), None)
    engine.allocate(allocation("a", 5))
    state = engine.state()
    key = engine.manager.requests["a"].keys[0]
    assert isinstance(key, bytes)
    assert (state.free, state.refs, state.rows) == ([3, 4, 5], {"1": 1, "2": 1}, {"a": [[1, 2]]})
    assert state.cached == {"1": (0, 4, key[:8].hex())}


def test_given_keys_are_shown_as_8_bytes():
    engine = numpy.NumpyEngine(header())
    engine.request_keyed("a", 9, [10, 0xABCDEF])
    engine.allocate(allocation("a", 9))
    assert [entry[2] for entry in engine.state().cached.values()] == ["000000000000000a", "0000000000abcdef"]
    assert engine.num_free() == 2
    assert engine.events() == []


@pytest.mark.parametrize("extra", [ExtraKeys(lora=["name"]), ExtraKeys(embeds=["0g"])])
def test_ill_formed_identities_are_named(extra):
    with pytest.raises(ConfigError, match="extra"):
        numpy.NumpyEngine(header()).request("a", range(5), extra)


def test_a_foreign_package_called_reference_is_named(monkeypatch):
    foreign = types.ModuleType("reference")
    foreign.__file__ = "/somewhere/else/reference/__init__.py"
    monkeypatch.setitem(__import__("sys").modules, "reference", foreign)
    with pytest.raises(HKVError, match="/somewhere/else/reference"):
        numpy.NumpyEngine(header())
