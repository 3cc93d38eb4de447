"""Each property finds a defect of one line: planted in the reference, found under traffic that is fine without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.dialects.vllm.traffic.traffic import drive
from hkv.keys import chained
from hkv.oracle.invariant import Invariant, InvariantError
from hkv.testing.choices import RandomChoices
from reference.dialects.vllm import coordinator, hits
from reference.dialects.vllm.kinds import sliding_window
from reference.dialects.vllm.kinds.full_attention import FullAttentionKind
from reference.dialects.vllm.kinds.kind import Kind
from reference.dialects.vllm.kinds.mamba import MambaKind
from reference.dialects.vllm.kinds.sliding_window import SlidingWindowKind
from reference.dialects.vllm.manager import Manager
from reference.state.pool import Pool
from tests.properties.planting import planted

DEFECTS = [
    ("form", FEATURES, Kind.free, "self.rows.pop(id, None)", "self.rows.get(id)"),
    (
        "bystanders",
        FEATURES,
        Manager.drop,
        "self._waiting(id)",
        "self._rules.free(self.cache, next(iter(self.requests)))",
    ),
    ("conservation", FEATURES, Pool.touch, "self.free.remove(block)", "pass"),
    ("references", FEATURES, Pool.touch, "refs[block] += 1", "refs[block] = 1"),
    ("references", FEATURES, Kind.retire, "self.pool.release(freed)", "pass"),
    ("references", ["partial"], Kind.copy_on_write, "self.pool.refs[target] += 1", "pass"),
    ("ownership", FEATURES, Pool.find, "self.table.first((group, chain))", "self.table.first((groups[0], chain))"),
    ("null block", FEATURES, Pool.__init__, "range(1, num_blocks)", "range(num_blocks)"),
    ("identity", FEATURES, chained.block_key, "tuple(tokens)", "tuple(tokens[1:])"),
    ("identity", FEATURES, chained.extra_keys, "start == 0 and identity.salt", "start and identity.salt"),
    ("index", FEATURES, Pool.take, "self.drop_keys(block)", "pass"),
    ("key life", FEATURES, Pool.evict, "for block in blocks", "for block in list(blocks)[:1]"),
    (
        "soundness",
        FEATURES,
        sliding_window.window_blocks,
        "ceil_div(window - 1, block_size)",
        "(window - 1) // block_size",
    ),
    ("soundness", FEATURES, MambaKind.find, "candidates[last]", "candidates[max(0, last - 1)]"),
    (
        "maximality",
        FEATURES,
        sliding_window.window_blocks,
        "ceil_div(window - 1, block_size)",
        "ceil_div(window, block_size)",
    ),
    ("maximality", ["eagle"], FullAttentionKind.find, "hit -= min(alignment, size)", "hit -= alignment"),
    ("draft margin", FEATURES, FullAttentionKind.find, "hit -= min(alignment, size)", "pass"),
    ("consistency", FEATURES, hits._rows, "del blocks[ceil_div(hit, kind.block_size) :]", "pass"),
    ("consistency", FEATURES, coordinator.longest_hit, "request.num_tokens - 1", "request.num_tokens"),
    ("monotonicity", FEATURES, Pool.find, "block is None", "len(self.table._blocks.get((group, chain), ())) != 1"),
    ("retirement", FEATURES, SlidingWindowKind.skipped_tokens, "self.spec.window + 1", "self.spec.window + 2"),
    ("retirement", FEATURES, MambaKind.retire, "blocks[row.retired : end] = [NULL]", "[NULL]"),
    ("room", FEATURES, Kind.allocate, "ceil_div(slots, self.block_size)", "ceil_div(main, self.block_size)"),
    ("admission", FEATURES, Manager._admit, "len(self.pool.free) - reserved", "len(self.pool.free) - 2 * reserved"),
    ("admission", FEATURES, Manager._admit, "len(self.pool.free) - reserved", "len(self.pool.free)"),
    ("admission", FEATURES, Manager._admit, "return False", "return not self.pool.take(1)"),
    ("eviction order", FEATURES, Pool.release, "self.free.prepend(unknown)", "self.free.append(unknown)"),
    ("eviction order", FEATURES, Kind.free, "reversed(row.blocks)", "row.blocks"),
    ("release", FEATURES, Kind.free, "self.rows.pop(id, None)", "self.rows.get(id)"),
    ("shadow tags", FEATURES, MambaKind.waits, "len(hit) > 0 and", "False and"),
    ("event index", FEATURES, Pool.drop_keys, "self.events.append(Removed(*key))", "pass"),
    ("hit admission", FEATURES, MambaKind.new_step, "self.new_keys.clear()", "pass"),
    (
        "registration",
        FEATURES,
        coordinator.cacheable_tokens,
        "unit = 1 if config.partial_hits else config.scheduler_block_size",
        "unit = 1",
    ),
    ("release", FEATURES, Pool.reset, "!= self.num_blocks - 1", "< self.num_blocks // 2"),
]
"""The invariant that finds it, what the traffic is about, and the defect."""

SEEDS = 64


@pytest.mark.parametrize(("name", "features", "function", "text", "defect"), DEFECTS)
def test_a_planted_defect_is_found(name, features, function, text, defect):
    with planted(function, text, defect):
        assert any(breaks(name, features, number) for number in range(SEEDS))


def test_the_same_traffic_breaks_nothing_without_a_defect():
    for number in range(SEEDS):
        play(number, FEATURES, INVARIANTS.values())


def test_a_hit_that_leaves_no_token_to_compute_is_no_matter_of_drafts():
    with planted(coordinator.longest_hit, "request.num_tokens - 1", "request.num_tokens"):
        named = {first_named(("core", "eagle"), number) for number in range(SEEDS // 2)}
    assert "consistency" in named
    assert "draft margin" not in named


def first_named(features: Sequence[str], number: int) -> str | None:
    """Of the invariants about hits, the one that breaks first."""
    try:
        play(
            number, features, [INVARIANTS[name] for name in ("soundness", "maximality", "draft margin", "consistency")]
        )
    except InvariantError as error:
        return error.name
    except Exception:
        return "the engine fails"
    return None


def test_every_invariant_has_a_defect_that_it_finds():
    assert {name for name, *_ in DEFECTS} == set(INVARIANTS)


def breaks(name: str, features: Sequence[str], number: int) -> bool:
    """Whether the invariant is what breaks; a defect may also make the engine fail by itself, which proves nothing."""
    try:
        play(number, features, [INVARIANTS[name]])
    except InvariantError as error:
        return error.name == name
    except Exception:
        return False
    return False


def play(number: int, features: Sequence[str], invariants: Iterable[Invariant]) -> None:
    choices = RandomChoices(number)
    header = draw_header(choices, features[number % len(features)], version=2)
    watch = Watch(NumpyEngine(header), header, invariants)
    drive(header, choices, watch.perform, steps=10)
