"""Windows under bounded replay: rows behind a hit, engines, vLLM's own, and where they are refused."""

from __future__ import annotations

import pytest

from hkv.cache.state import require_expressible
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.schedule.run import VllmReplayedCache
from hkv.errors import ConfigError
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import Only, differ, draw
from hkv.spec import spec_from_log, spec_from_text, spec_to_log
from hkv.spec.sliding_window import ReplayedWindow
from tests.oracle import sample
from tests.oracle.test_live_logs import VLLM

GROUPS = [{"kind": "full_attention", "block_size": 2}, {"kind": "replayed_window", "block_size": 2, "window": 4}]
ASKED = frozenset({"replayed_window", "full_attention", "sliding_window"})


def test_it_reads_a_window_and_is_never_cached() -> None:
    spec = spec_from_text("replayed:2:4")
    assert spec == ReplayedWindow(block_size=2, window=4) == spec_from_log(spec_to_log(spec))
    assert (spec.reads(9), layer(spec).retired(9, 2), spec.prefix_cacheable) == ((range(6, 9),), range(3), False)


def test_it_is_drawn_and_refused_by_name() -> None:
    drawn = [draw("core", seed, 3)[0] for seed in range(80)]
    assert any(group["kind"] == "replayed_window" for header in drawn for group in header.groups)
    assert not any("replayed_window" in str(draw("core", seed, 2)[0].groups) for seed in range(60))
    with pytest.raises(ConfigError, match="kind = 'replayed_window': expected version 3"):
        to_config(sample.header(oplog=2, groups=GROUPS))
    config = to_config(sample.header(oplog=3, groups=GROUPS))
    for refuses in (require_expressible, VllmReplayedCache):
        with pytest.raises(ConfigError, match=r"groups\[1\].kind = 'replayed_window': expected a kind that needs no"):
            refuses(config)


def traffic(engine: str = "numpy", seeds: int = 6) -> None:
    """An engine beside the reference under random traffic, with every invariant where it is the reference."""
    having = 0
    for seed in range(seeds):
        feature = ("core", "eagle", "retention")[seed % 3]
        drawn, choices = draw(feature, seed, 3, Only(ASKED))
        having += any(group["kind"] == "replayed_window" for group in drawn.groups)
        if engine == "numpy":
            VLLM.drive(drawn, choices, VLLM.watch(NumpyEngine(drawn), drawn).perform, 12)
        _, parted = differ(engine_factory(engine), NumpyEngine, feature, seed, 3, 10, only=Only(ASKED))
        assert parted is None, parted
    assert 2 * having > seeds


@pytest.mark.parametrize("engine", ["numpy", "jax"])
def test_engines_agree_under_traffic(engine: str) -> None:
    traffic(engine)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_agrees_under_traffic() -> None:
    traffic("vllm", 24)
