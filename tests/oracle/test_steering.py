"""Traffic steered by a record of what seeds reached: what is kept, and how seeds go through it."""

from __future__ import annotations

import pytest

from hkv.contract import registry
from hkv.contract.log import Log
from hkv.contract.traffic import STEERED
from hkv.dialects.vllm.config import EARLIER, NAME
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.traffic.headers import FEATURES, REACHING, kept, written
from hkv.errors import ConfigError
from hkv.oracle.comparison import Comparison
from hkv.oracle.record import ALL, EACH, Only, choose, draw, features_of, record

VERSIONS = registry.dialect_of(registry.DEFAULT).versions


def test_what_few_reach_comes_first_and_every_sort_is_there():
    reached = {f"common-{place}": frozenset({"a", "b", "c"}) for place in range(40)}
    reached |= {"rare": frozenset({"a", "d"}), "other": frozenset({"a"})}
    assert choose(reached, 1, lambda name: "") == ["rare"]
    chosen = choose(reached, 6, lambda name: name.partition("-")[0])
    assert chosen[:3] == ["common-0", "rare", "other"]
    assert [name.partition("-")[0] for name in chosen].count("common") >= EACH


def test_a_seed_is_a_kept_configuration():
    """The first seeds go through what is kept, in order, each with the version that it was kept with."""
    count = len(VERSIONS)
    for turn, version in enumerate(VERSIONS):
        ours = kept(version)
        assert len(ours) > 5
        for place in (0, 3, len(ours) - 1):
            header, choices = draw(STEERED, count * place + turn, version)
            again, others = draw(STEERED, count * (place + len(ours)) + turn, version)
            assert header == again == ours[place].header
            assert header.oplog == version
            assert [choices.integer(0, 9) for _ in range(40)] != [others.integer(0, 9) for _ in range(40)]


def test_later_versions_draw_the_same_configurations_from_the_middle_on():
    for version, known in ((3, 2), (4, 1)):
        header, _ = draw(STEERED, 0, version)
        assert header.oplog == version
        assert header.groups == kept(known)[len(kept(known)) // 2].header.groups
    assert all("copied-before-written" in each.header.bugs for each in kept(3) if each.header.partial_hits)


def test_a_selection_without_kept_configurations_has_no_such_feature():
    assert features_of(ALL) == (STEERED, *REACHING, *FEATURES)
    none = Only(frozenset({"chunk_pair"}))
    assert features_of(none) == tuple(each for each in (*REACHING, *FEATURES) if each != "partial")
    with pytest.raises(ConfigError, match="feature = 'steered'"):
        draw(STEERED, 0, 2, none)
    few = Only(max_groups=1)
    assert all(len(draw(STEERED, seed, VERSIONS[seed % len(VERSIONS)], few)[0].groups) == 1 for seed in range(6))


def test_the_file_says_what_is_kept():
    lines = written([*kept(1), *kept(2)]).splitlines()
    assert len(set(lines)) == len(lines) == 50
    assert {each.header.feature for each in (*kept(1), *kept(2))} == {*REACHING, *FEATURES}


def test_kept_traffic_still_reaches_what_is_rare():
    """Rules that no other feature's seeds reach often; a change of the traffic that loses them wants a new record."""
    rare = {"admit/edge", "refuse/copy", "hit/drops-nothing-left", "lookup/after-reset", "mamba/checkpoint"}
    found: set[str] = set()
    for seed in range(50):
        recording = record(NumpyEngine, STEERED, seed, 1 + seed % 2, 16)
        log = Log(path="", header=recording.header, operations=tuple(recording.operations))
        found |= rare & registry.dialect_of(NAME).exercised(log).keys()
        if found == rare:
            break
    assert found == rare


def test_other_dialects_have_no_such_feature():
    for dialect in registry.dialects():
        for name in dialect.names:
            if name not in (NAME, EARLIER):
                assert STEERED not in dialect.features(name)
                assert not dialect.kept(2, name)


def test_versions_in_turn_are_those_of_the_kinds_that_are_asked_for():
    dialect = registry.dialect_of(registry.DEFAULT)
    assert dialect.drawn_versions(frozenset()) == VERSIONS
    for kind, first in (("sink_window", 2), ("cross_attention", 3)):
        only = Only(frozenset({kind, "full_attention"}))
        assert dialect.drawn_versions(only.kinds) == tuple(each for each in VERSIONS if each >= first)
        compared = Comparison(("numpy", "numpy"), only, steps=2)
        compared.require(compared.features)
        assert not any(compared.seed("core", seed) for seed in range(4))
    with pytest.raises(ConfigError, match="kinds = 'opaque'"):
        features_of(Only(frozenset({"opaque"})))


def test_an_engine_without_the_methods_of_a_version_is_left_out_by_name():
    class Early(NumpyEngine):
        retire = property()  # type: ignore[assignment]

    compared = Comparison((Early, "numpy"), Only(), steps=2)
    assert not any(compared.seed("core", seed) for seed in range(2 * len(VERSIONS)))
    result = compared.result([])
    assert result.not_implemented == 2 * sum(version > 2 for version in VERSIONS)
    assert "an engine that has retire" in result.reason
