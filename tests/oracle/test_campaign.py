"""A campaign against an engine of another: known defects, a declared definition, programs that take another header."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hkv.cli.diff import command
from hkv.contract import registry
from hkv.contract.bugs import Bug, listed
from hkv.dialects.vllm.dialect import VllmDialect
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import ConfigError
from hkv.oracle.comparison import diff
from hkv.oracle.record import Only, draw
from hkv.oracle.shrink import shrink_rules
from tests.oracle.test_diagnosis import FreesUnderAStep, SharesAdapters

FREES, SHARES = "frees-under-a-step", "shares-adapters"


class FreesAndShares(FreesUnderAStep, SharesAdapters):
    """Both defects."""


def knowing(header: Any) -> NumpyEngine:
    """The reference, which reproduces both defects by name."""
    forms = {(): NumpyEngine, (FREES,): FreesUnderAStep, (SHARES,): SharesAdapters, (FREES, SHARES): FreesAndShares}
    named = tuple(name for name in (FREES, SHARES) if name in header.bugs)
    return forms[named](msgspec.structs.replace(header, bugs=[name for name in header.bugs if name not in named]))


@pytest.fixture
def bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vLLM dialect knows both defects."""
    made = [Bug(name, "an engine of the tests", "", "") for name in (FREES, SHARES)]
    monkeypatch.setattr(VllmDialect, "bugs", listed(*made))
    monkeypatch.setattr(VllmDialect, "engines", MappingProxyType({"numpy": f"{__name__}:knowing"}))


@pytest.mark.usefixtures("bugs")
def test_a_campaign_goes_on_past_what_is_known(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"features": ["core"], "seeds": 40, "version": 2}
    assert not diff(FreesUnderAStep, "numpy", **settings).agrees
    known = diff(FreesUnderAStep, "numpy", **settings, known=[FREES, SHARES])
    assert known.agrees
    assert known.seeds == 40
    assert 0 < known.known[FREES] <= 40
    assert known.known[SHARES] == 0
    both = diff(FreesAndShares, "numpy", **settings, known=[FREES, SHARES])
    assert both.agrees
    assert both.known[FREES]
    assert both.known[SHARES]
    (found,) = diff(FreesAndShares, "numpy", **settings, known=[FREES]).found
    assert found.invariant in {"identity", "soundness", "shadow tags"}, found.broken
    found.write(tmp_path / "found.jsonl")
    assert f'"bugs":["{FREES}"]' in (tmp_path / "found.jsonl").read_text()


@pytest.mark.usefixtures("bugs")
def test_the_command_counts_what_is_known() -> None:
    engines = f"{__file__}:FreesUnderAStep,numpy"
    how = ["--engines", engines, "--feature", "core", "--seeds", "10", "--version", "2"]
    done = CliRunner().invoke(command, [*how, "--known", f"{FREES},{SHARES}"])
    assert done.exit_code == 0, done.output
    assert f"seeds differ in nothing but {FREES}" in done.output
    assert f"known defect: 0 seeds differ in nothing but {SHARES}" in done.output
    done = CliRunner().invoke(command, [*how, "--known", "nothing-known"])
    assert isinstance(done.exception, ConfigError)
    assert "nothing-known" in str(done.exception)


def test_blame_follows_the_definition() -> None:
    """An engine that is right by declaration is never in doubt: an invariant that it breaks is."""
    settings: dict[str, Any] = {"features": ["core"], "seeds": 60, "version": 2, "shrink": False}
    for pair in ((FreesUnderAStep, "numpy"), ("numpy", FreesUnderAStep)):
        (found,) = diff(*pair, **settings, definition=FreesUnderAStep).found
        assert found.engines == ("numpy", "FreesUnderAStep")
        assert not found.headline.startswith("FreesUnderAStep")
        assert "breaks" not in found.headline
        assert found.record()["invariant_of_other"] == "retirement"
    with pytest.raises(ConfigError, match="definition = 'jax'"):
        diff("numpy", FreesUnderAStep, **settings, definition="jax")


def test_an_invariant_that_both_engines_break_blames_neither() -> None:
    class HitsNothing(NumpyEngine):
        """Finds nothing of the first requests that could hit; or ever."""

        misses, first = 0, 1 << 30

        def lookup(self, id: str) -> Any:
            found = super().lookup(id)
            self.misses += found.hit > 0
            return type(found)(0, [[] for _ in found.blocks], 0) if self.misses <= self.first else found

    class HitsNothingAtFirst(HitsNothing):
        first = 1

    (found,) = diff(HitsNothing, HitsNothingAtFirst, features=["core"], seeds=60, version=2, shrink=False).found
    assert found.broken == "both engines break maximality: it may itself be wrong, or the operations"
    assert not found.headline.startswith("maximality")


@pytest.mark.parametrize("name", registry.names())
def test_no_smaller_configuration_has_another_dialect(name: str) -> None:
    dialect = registry.dialect_of(name)
    for version in dialect.drawn_versions(frozenset()):
        for feature in dialect.features(name):
            for seed in range(3):
                header = draw(feature, seed, version, Only(dialect=name))[0]
                for smaller in shrink_rules(header).headers(header):
                    assert smaller.dialect == name
