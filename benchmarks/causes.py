"""Causes of misses over drawn traces and caches, both engines' rules, held to what proves them.

    python benchmarks/causes.py --draws 300

For each draw: every prompt token is a hit or has one cause. Each cause is what a replay without it gains, made here
once more: "evicted" in a pool that evicts nothing; "not computed yet" in that pool with requests hours apart; what is
"not retained" is left, so that no replay there with another retention gains more, nor any of what is "never computed";
"refused" are the prompts of requests that were. The causes do not change with the order of the groups,
where the hits do not; what the advice says finds most is what of all replays with something changed found most. With
`--compiled`, the compiled replay says the same of every request as the plain one over NumPy.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import click
import numpy as np

from hkv.contract import registry
from hkv.machine import native_loops
from hkv.replay.attribution import CAUSES, FELL_SHORT, NOT_COMPUTED, REFUSED
from hkv.replay.command import StudiedCache
from hkv.replay.observed import EVICTED, NOT_RETAINED
from hkv.replay.result import advice, ceilings, result_of, totals
from hkv.replay.run import COMPILED, EVICTS_NOTHING, REFERENCE, Outcome, ReplayedCache, Timing, default_engine, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TraceRequest
from hkv.replay.traces.workloads import DEFAULTS, Workload, generate
from hkv.replay.verb import cache_options
from hkv.spec import spec_from_text

CACHES = (
    ("vllm-0.33", "full:4", (30, 120)),
    ("vllm-0.33", "full:4,swa:4:32,swa:4:8", (70, 400)),
    ("vllm-0.33", "full:8,swa:4:20", (60, 300)),
    ("vllm-0.33", "full:4,mamba:16", (60, 300)),
    ("vllm-0.33", "full:4,mamba:4", (60, 300)),
    ("rtp-llm/single", "full:4", (60, 200)),
    ("rtp-llm/hybrid", "full:4,mamba:4", (120, 400)),
    ("rtp-llm/hybrid-pool", "full:4,swa:4:4", (60, 200)),
    ("sglang-0.5.23", "full:4", (40, 200)),
    ("sglang-0.5.23", "full:4,swa:4:32", (70, 400)),
    ("sglang-0.5.23", "full:16,mamba:16", (20, 60)),
    ("vllm-0.33", "full:4,swa:4:8", (70, 300)),
)
"""Dialects, groups, and pools from one in which little fits to one in which most does."""

TIERED = len(CACHES) - 1
"""The one that has a second tier."""

ROOM = 1 << 14
"""Blocks that compiled programs have room for, so that all draws of a kind share one."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """A trace, a cache and a schedule."""

    trace: InternedTrace
    options: dict[str, Any]

    def studied(self, order: tuple[int, ...] = ()) -> StudiedCache:
        """The cache, its groups perhaps in another order."""
        options = dict(self.options)
        if order:
            options["groups"] = [options["groups"][place] for place in order]
        return registry.dialect_of(options["dialect"]).replay_command().studied(options)


def drawn(seed: int) -> Draw:
    """The draw of a seed."""
    source = random.Random(seed)
    dialect, text, (least, most) = CACHES[seed % len(CACHES)]
    workload = Workload(
        requests=24,
        rate=source.choice((5.0, 40.0)),
        prefix_tokens=30,
        prompt_tokens=20,
        output_tokens=12,
        turns=4.0,
        pause=0.2,
        max_tokens=220,
    )
    requests = [
        TraceRequest(
            line=place,
            timestamp=each.timestamp or 0,
            input_length=each.input_length,
            output_length=each.output_length,
            tokens=np.asarray(each.tokens).tolist(),
            output_tokens=np.asarray(each.output_tokens).tolist(),
            tokens_per_id=1,
        )
        for place, each in enumerate(generate(source.choice(sorted(DEFAULTS)), workload, seed))
    ]
    own: dict[str, object] = {}
    if dialect == "vllm-0.33":
        own["retention"] = source.choice((None, 0, 0, 32 if "," in text else 0))
    elif "mamba" in text:
        own |= {} if dialect.startswith("sglang") else {"linear_step": source.choice((1, 2, 4))}
    if dialect.startswith("sglang"):
        own["schedule_policy"] = "replay" if "mamba" in text else source.choice(("replay", "fcfs", "lpm"))
    if seed % len(CACHES) == TIERED:
        own |= {"offload": str(source.randint(30, 300))}
    blocks = source.randint(least, most)
    if dialect.startswith("sglang") and "," in text:
        blocks = [blocks, 40 if "mamba" in text else blocks // 2]
    given = {
        "groups": [spec_from_text(part) for part in text.split(",")],
        "num_blocks": blocks,
        "dialect": dialect,
        "step_tokens": source.choice((16, 64)),
        "decode_tokens": source.choice((1, 3)),
        "max_running": 8,
        "max_model_len": source.choice((240, 240, 120)),
    }
    options = cache_options(closed_loop=source.choice((0, 0, 3)), **given, **own)
    return Draw(InternedTrace(requests), options)


def check(seed: int, compiled: bool = False) -> collections.Counter[str]:
    """Holds one draw to all of it. Returns tokens by cause, and how often each comparison had something to compare.

    Raises:
      AssertionError: something is not as it should be.
    """
    draw = drawn(seed)
    outcome = _replayed(draw)
    causes = _columns(outcome)
    seen = collections.Counter({cause: int(causes[cause].sum()) for cause in CAUSES})
    told = np.sum([causes[cause] for cause in CAUSES], axis=0)
    admitted = causes["admitted"] >= 0
    assert np.array_equal(told + np.where(admitted, causes["hit"], 0), causes["prompt"]), seed
    assert np.array_equal(causes[REFUSED], np.where(admitted, 0, causes["prompt"])), seed
    assert totals(outcome)["prompt_tokens"] == sum(each.input_length for each in draw.trace.requests), seed
    seen.update(_against_others(draw, outcome, causes, seed))
    seen.update(_in_other_orders(draw, outcome, causes, seed))
    seen.update(_advised(draw, outcome, seed))
    if compiled and default_engine(draw.studied().cache)[0] == COMPILED:
        fast = _columns(_replayed(draw, engine=COMPILED))
        for name, column in causes.items():
            assert np.array_equal(column, fast[name]), (seed, name)
        seen["compiled"] += 1
    return seen


def _replayed(draw: Draw, order: tuple[int, ...] = (), engine: str = REFERENCE) -> Outcome:
    studied = draw.studied(order)
    studied.cache.room = ROOM
    return replay(draw.trace, studied.cache, studied.schedule, Timing(), engine=engine)


def _columns(outcome: Outcome) -> dict[str, np.ndarray]:
    return dict(result_of(outcome, REFERENCE).requests)


def _against_others(draw: Draw, outcome: Outcome, causes: dict[str, np.ndarray], seed: int) -> dict[str, int]:
    """Replays with causes removed one after the other, without asking for causes."""
    studied, requests = draw.studied(), draw.trace.requests
    lengths = [each.input_length + each.output_length for each in requests]
    needs = sum(lengths), len(requests), studied.schedule
    large = studied.cache.changed(*needs)[EVICTS_NOTHING]
    apart = InternedTrace([dataclasses.replace(each, timestamp=10_000_000 * i) for i, each in enumerate(requests)])
    alone = dataclasses.replace(studied.schedule, closed_loop=0)
    unevicted, spread = _hits(draw.trace, large, studied.schedule), _hits(apart, large, alone)
    admitted = causes["admitted"] >= 0

    def gain(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.where(admitted, np.maximum(other - mine, 0), 0)

    most = np.maximum(causes["hit"], unevicted)
    assert np.array_equal(causes[EVICTED], gain(causes["hit"], unevicted)), seed
    assert np.array_equal(causes[NOT_COMPUTED], gain(most, spread)), seed
    left, most = causes[NOT_RETAINED] + causes[FELL_SHORT], np.maximum(most, spread)
    for change, cache in large.changed(*needs).items():
        if not change.startswith("Blocks"):
            assert (gain(most, _hits(apart, cache, alone)) <= left).all(), (seed, change)
    loses = (admitted & (unevicted < causes["hit"])).any()
    return {"it loses somewhere" if loses else "it loses nowhere": 1}


def _hits(trace: InternedTrace, cache: ReplayedCache, schedule: Schedule) -> np.ndarray:
    """Hits of all requests in a pool that evicts nothing."""
    other = replay(trace, cache, schedule, Timing(), causes=False)
    assert other.evictions == 0
    return np.array([record.hit for _, record in sorted(other.recorder.requests.items())])


def _in_other_orders(draw: Draw, outcome: Outcome, causes: dict[str, np.ndarray], seed: int) -> dict[str, int]:
    groups = len(outcome.cache.groups)
    if groups == 1 or draw.options["dialect"].startswith("sglang"):  # whose groups have one order
        return {}
    turned = _replayed(draw, tuple(range(groups))[::-1])
    others = _columns(turned)
    assert outcome.unevicted is not None
    assert turned.unevicted is not None
    pairs = ((outcome, turned), (outcome.unevicted, turned.unevicted))
    hits = [[[record.hit for record in each.recorder.requests.values()] for each in pair] for pair in pairs]
    if any(mine != other for mine, other in hits):
        return {"hits depend on the order": 1}
    for cause in CAUSES:
        assert np.array_equal(causes[cause], others[cause]), (seed, cause)
    return {"orders compared": 1}


def _advised(draw: Draw, outcome: Outcome, seed: int) -> dict[str, int]:
    """The advice against all replays with something changed."""
    studied = draw.studied()
    requests = draw.trace.requests
    tokens = sum(each.input_length + each.output_length for each in requests)
    found = {}
    for change, cache in studied.cache.changed(tokens, len(requests), studied.schedule).items():
        other = replay(draw.trace, cache, studied.schedule, Timing(), causes=False)
        found[change] = sum(record.hit for record in other.recorder.requests.values())
    said = advice(outcome, ceilings(draw.trace, outcome, studied.schedule, Timing(), REFERENCE))[-1]
    if len(found) < 2:
        return {}
    mine, best = sum(record.hit for record in outcome.recorder.requests.values()), max(found.values())
    if said == "None of these finds more.":
        return {"nothing finds more": 1}
    named = next(change for change in found if change in said)
    assert found[named] == best > mine, (seed, said, found)
    return {"advice compared": 1}


@click.command()
@click.option("--draws", default=300, show_default=True, type=click.IntRange(min=1))
@click.option("--first", default=0, show_default=True, type=click.IntRange(min=0), help="The first seed.")
@click.option("--compiled", is_flag=True, help="Compare the compiled replays too.")
def main(draws: int, first: int, compiled: bool) -> None:
    """Hold causes of misses to what proves them."""
    native_loops.enable()
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + draws):
        seen.update(check(seed, compiled))
    print(f"{draws} draws: causes add up, and evicted tokens are what a pool without evictions finds more")
    for name, count in seen.items():
        if name not in (NOT_COMPUTED, NOT_RETAINED, EVICTED) or count:
            print(f"{name}: {count:,}")


if __name__ == "__main__":
    main()
