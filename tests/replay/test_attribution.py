"""Every prompt token that was no hit has one cause: each shown by a smallest trace."""

import collections
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import causes as proofs
from hkv.contract import registry
from hkv.dialects.vllm.schedule.run import VllmReplayedCache, cache_config
from hkv.replay.attribution import CAUSES, NOT_COMPUTED, Evicted, Missed
from hkv.replay.observed import EVICTED, HAD, NOT_RETAINED, MissReason
from hkv.replay.plot import causes_over_time
from hkv.replay.result import advice, ceilings, result_of, totals
from hkv.replay.run import Timing, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import BLOCK, InternedTrace, shared_prefixes
from hkv.replay.traces.reader import TraceRequest
from hkv.replay.verb import cache_options
from hkv.spec import OpaqueState, spec_from_text


def of_tokens(*prompts, output=0, every=1000):
    return [
        TraceRequest(line=i, timestamp=i * every, input_length=len(prompt), output_length=output, tokens=list(prompt),
                     output_tokens=[9] * output, tokens_per_id=1)
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def of_ids(*prompts, size=8):
    return [
        TraceRequest(line=i, timestamp=i * 1000, input_length=length, output_length=0, hash_ids=ids, tokens_per_id=size)
        for i, (length, ids) in enumerate(prompts)
    ]


def causes(groups, requests, *, num_blocks=60, schedule=None, **options):
    """Tokens by cause of each request, as the result's columns have them, those of no token left out; hits too."""
    specs = [spec_from_text(part) for part in groups.split(",")] if isinstance(groups, str) else groups
    schedule = schedule or Schedule(step_tokens=64, max_model_len=400)
    outcome = replay(
        requests, VllmReplayedCache(cache_config(specs, num_blocks, schedule, **options)), schedule, Timing()
    )
    columns = result_of(outcome, "numpy").requests
    told = [
        {name: int(columns[name][place]) for name in ("hit", *CAUSES) if columns[name][place]}
        for place in range(len(requests))
    ]
    for request, each in zip(requests, told, strict=True):
        assert sum(each.values()) == request.input_length
    sums = outcome.missed
    assert sum(sums.tokens.values()) + sum(columns["hit"]) == sum(columns["prompt"])
    return told


def tight(requests):
    """A replay in nine blocks of four tokens."""
    schedule = Schedule(step_tokens=64, max_model_len=40)
    return replay(
        requests, VllmReplayedCache(cache_config([spec_from_text("full:4")], 10, schedule)), schedule, Timing()
    )


ABC = range(1, 13)


@pytest.mark.parametrize(
    ("groups", "prompts", "told"),
    [
        ("full:4", [ABC], {"first use": 12}),
        ("full:1", [ABC, ABC], {"hit": 11, "last token": 1}),
        ("full:4", [ABC, [*ABC[:6], 99]], {"hit": 4, "block granularity": 2, "first use": 1}),
        (
            "full:8,swa:4:20",
            [range(1, 20), [*range(1, 15), 99]],
            {"hit": 8, "hit unit": 4, "block granularity": 2, "first use": 1},
        ),
        (
            "full:4,mamba:4",
            [range(1, 26), [*range(1, 18), 99]],
            {"not retained": 16, "block granularity": 1, "first use": 1},
        ),
    ],
    ids=["nobody asked before", "last token", "blocks", "units of hits", "states passed over"],
)
def test_causes_of_the_last_prompt(groups, prompts, told):
    assert causes(groups, of_tokens(*prompts))[-1] == told


def test_the_granularity_of_the_trace():
    """Both prompts begin with id 0 and differ in the next 8 tokens, of which at most 7 are equal."""
    told = causes("full:4", of_ids((24, [0, 1, 2]), (24, [0, 3, 4])))
    assert told == [{"first use": 24}, {"hit": 8, "trace granularity": 7, "first use": 9}]
    bare = TraceRequest(line=1, timestamp=0, input_length=30, output_length=0)
    assert causes("full:4", [bare, bare]) == [{"trace granularity": 30}] * 2, "a prompt that the trace does not name"


def test_the_drop_of_a_draft():
    told = causes("full:4", of_tokens(ABC, [*ABC, 99]), eagle=())
    assert told[1] == {"hit": 8, "draft drop": 4, "first use": 1}


def test_what_is_computed_at_the_same_time():
    told = causes("full:4", of_tokens(ABC, [*ABC, 99], every=0), schedule=Schedule(step_tokens=16, max_model_len=60))
    assert told[1] == {"hit": 12, "first use": 1}, "what one step computes, the same step finds: vLLM registers at once"
    cut = Schedule(step_tokens=8, decode_tokens=1, max_running=2, max_model_len=60)
    told = causes("full:4", of_tokens([*ABC, 98], [*ABC, 99], every=0), schedule=cut)
    assert told[1] == {"hit": 12, "first use": 1}


def test_what_an_answer_leaves_uncomputed():
    """The last token of an answer is never computed: a prompt that goes on from it computes it."""
    by_one = Schedule(step_tokens=64, decode_tokens=1, max_model_len=40)
    told = causes("full:1", of_tokens([1, 2, 3], [1, 2, 3, 9, 9, 8], output=2), schedule=by_one)
    assert told[1] == {"hit": 4, "never computed": 1, "first use": 1}
    by_two = Schedule(step_tokens=64, decode_tokens=2, max_model_len=40)
    told = causes("full:1", of_tokens([1, 2, 3], [1, 2, 3, 9, 9, 8], output=2), schedule=by_two)
    assert told[1] == {"hit": 3, "never computed": 2, "first use": 1}, "all that the last step generates"


def test_requests_hours_apart_find_nothing_that_is_not_computed_yet():
    """SGLang keeps no window where the second prompt leaves the first: it is computed, not retained."""
    requests = of_tokens(range(400), [*range(208), *range(9000, 9100)], output=3, every=10_000_000)
    options = cache_options(dialect="sglang-0.5.23", groups=[*map(spec_from_text, ("full:16", "swa:16:64"))],
                            num_blocks=600)  # fmt: skip
    studied = registry.dialect_of("sglang-0.5.23").replay_command().studied(options)
    outcome = replay(requests, studied.cache, studied.schedule, Timing())
    tokens = {cause: count for cause, count in outcome.missed.tokens.items() if count}
    assert tokens == {"first use": 500, "not retained": 208}


def test_what_a_request_lacks_that_comes_too_early():
    """Under RTP-LLM's rules a prompt is found when its request has ended: the second one comes before."""
    options = cache_options(dialect="rtp-llm/single", groups=[spec_from_text("full:4")], num_blocks=60, decode_tokens=1)
    studied = registry.dialect_of("rtp-llm/single").replay_command().studied(options)
    told = {}
    for every in (0, 10_000):
        outcome = replay(of_tokens(ABC, [*ABC, 99], output=3, every=every), studied.cache, studied.schedule, Timing())
        told[every] = {cause: count for cause, count in outcome.missed.tokens.items() if count}
    assert told == {0: {"first use": 13, "not computed yet": 12}, 10_000: {"first use": 13}}


def test_refused_prompts_are_prompts():
    """A pool that refuses a long prompt does not hit more of all of them than one that serves it."""
    requests = of_tokens(ABC, range(100, 160), [*ABC, 99])
    schedule = Schedule(step_tokens=64, max_model_len=400)
    found = {}
    for blocks in (10, 60):
        cache = VllmReplayedCache(cache_config([spec_from_text("full:4")], blocks, schedule))
        outcome = replay(requests, cache, schedule, Timing())
        found[blocks] = totals(outcome)
        assert sum(outcome.missed.tokens.values()) + found[blocks]["hit_tokens"] == 12 + 60 + 13
        assert outcome.missed.tokens["refused"] == (60 if blocks == 10 else 0)
    assert found[10]["never_fit"], "which the larger pool serves"
    assert [each["hit_rate"] for each in found.values()] == [12 / 85, 12 / 85]


def test_evictions_and_by_whose_pressure():
    requests = of_tokens(ABC, range(20, 48), [*ABC, 99])
    assert causes("full:4", requests, num_blocks=10)[2] == {"hit": 8, "evicted": 4, "first use": 1}
    outcome = tight(requests)
    (evicted,) = outcome.missed.evicted
    assert (evicted.group, evicted.taker, evicted.tokens, evicted.requests) == (0, 0, 4, 1)
    assert evicted.steps == 20, "the second request came one second, 20 steps, before the third"
    columns = result_of(outcome, "numpy").requests
    assert columns["evicted_for"].tolist() == [-1, -1, 0]
    assert columns["evicted_steps_before"].tolist() == [-1, -1, 20]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_is_said_of_equal_losses_does_not_depend_on_the_order_of_groups(order):
    """Row and sentence name the same groups, by their names, where groups lost as much."""
    names = ["full:16", "swa:16:32", "swa:16:64"]
    lost = {(0, 1): 8, (1, 1): 8, (2, 0): 8, (2, 1): 4}
    place = {group: at for at, group in enumerate(order)}
    evicted = [Evicted(place[group], place[taker], tokens, 1, 5) for (group, taker), tokens in lost.items()]
    by_group = [collections.Counter({EVICTED: 12, NOT_RETAINED: 7}) for _ in names]
    found = Missed({EVICTED: 28}, tuple(by_group), (), tuple(sorted(evicted, key=lambda each: each.group)), {})
    there = [names[group] for group in order]
    most = found.most_evicted(there)
    assert (there[most.group], there[most.taker]) == ("swa:16:64", "full:16")
    assert found.most_lacking(NOT_RETAINED, there) == "swa:16:64"
    assert not found.most_lacking(NOT_COMPUTED, there)


@pytest.mark.parametrize(("beyond", "said"), [(-4, "nothing to find"), (0, "nothing to find"), (4, "had it")])
def test_a_group_had_something_only_beyond_the_hit(beyond, said):
    """Computed tokens may end at the hit, or before it where a dialect is asked before the hit is known."""
    outcome = tight(of_tokens(ABC, [*ABC, 99]))
    record = outcome.unevicted.recorder.requests[1]
    record.computed, record.miss_reasons = record.hit + beyond, (MissReason(HAD),)
    assert outcome.missed.reasons == (collections.Counter({"nothing to find": 1}) + collections.Counter({said: 1}),)


def test_windows_that_were_not_retained():
    requests = of_tokens(range(1, 26), [*range(1, 18), 99])
    told = causes("full:4,swa:4:5", requests, retention_interval=0)
    assert told[1] == {"not retained": 16, "block granularity": 1, "first use": 1}
    assert causes("full:4,swa:4:5", requests)[1] == {"hit": 16, "block granularity": 1, "first use": 1}


def test_caching_off_and_groups_that_are_never_shared():
    requests = of_tokens(ABC, [*ABC, 99])
    assert causes("full:4", requests, caching=False)[1] == {"caching is off": 12, "first use": 1}
    assert causes([OpaqueState(block_size=4)], requests)[1]["never shared"] == 12


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK + 9), min_size=1, max_size=8),
    copied=st.lists(st.integers(0, 2 * BLOCK + 9), max_size=8),
    output=st.integers(0, 5),
    decode=st.integers(0, 3),
)
def test_shared_tokens_are_the_longest_common_prefix(prompts, copied, output, decode):
    """Answers count; where so many tokens are generated a step, those of the last step do not."""
    for place, length in enumerate(copied, start=1):
        if place < len(prompts):
            prompts[place] = [*prompts[place - 1][:length], *prompts[place]]
    limit, computed = 2 * BLOCK + 20, output
    shared, unresolved = shared_prefixes(of_tokens(*prompts, output=output), limit, decode)
    if decode and output:
        computed = max(each for each in range(0, output, decode))
    for place, prompt in enumerate(prompts):
        before = [[*other, *[9] * computed] for other in prompts[:place] if len(other) + output <= limit]
        assert shared[place] == max((common(prompt, other) for other in before), default=0)
    assert not unresolved.any()


def common(mine, other):
    return next(
        (i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), min(len(mine), len(other))
    )


@given(seed=st.integers(0, 1 << 30), size=st.integers(2, 6))
def test_what_ids_do_not_say_lies_between_the_bounds(seed, size):
    """Prompts of tokens, told by ids: they share at least what the ids say, and at most what these leave open."""
    source = random.Random(seed)
    prompts, ids, requests = [], {}, []
    for _ in range(source.randint(1, 8)):
        old = source.choice([*prompts, []])
        prompt = old[: source.randint(0, len(old))] + [source.randint(0, 1) for _ in range(source.randint(1, 12))]
        prompts.append(prompt)
        parts = [tuple(prompt[: end + size]) for end in range(0, len(prompt), size)]
        names = [ids.setdefault(part, len(ids)) for part in parts]
        requests.append((len(prompt), names))
    told = of_ids(*requests, size=size)
    shared, unresolved = shared_prefixes(told, 1000)
    for place, prompt in enumerate(prompts):
        truth = max((common(prompt, other) for other in prompts[:place]), default=0)
        assert shared[place] <= truth <= shared[place] + unresolved[place], (place, prompts)
        assert unresolved[place] < size


def test_ceilings_are_replays_with_one_thing_changed():
    requests = of_tokens(*([*range(30), *range(100 * i, 100 * i + 20)] for i in (1, 2, 1, 3, 2, 1)), output=2)
    specs = [spec_from_text("full:4"), spec_from_text("swa:4:6")]
    schedule = Schedule(step_tokens=64, max_model_len=80)

    def hits(specs, blocks, retention):
        config = cache_config(specs, blocks, schedule, retention_interval=retention)
        outcome = replay(requests, VllmReplayedCache(config), schedule, Timing())
        return outcome, sum(record.hit for record in outcome.recorder.requests.values())

    outcome, plain = hits(specs, 30, 0)
    found = {each.change: each for each in ceilings(InternedTrace(requests), outcome, schedule, Timing(), "numpy")}
    infinite, dense, fine = found["A pool that evicts nothing"], found["Dense retention"], found["Blocks of 1, 1"]
    assert infinite.evictions == 0 < outcome.evictions
    assert infinite.hit_tokens == hits(specs, 1000, 0)[1] > plain
    assert dense.hit_tokens == hits(specs, 30, None)[1]
    finest = [spec_from_text("full:1"), spec_from_text("swa:1:6")]
    assert fine.hit_tokens == hits(finest, 29 * 4 + 1, 0)[1]
    said = " ".join(advice(outcome, tuple(found.values())))
    assert f"{infinite.hit_rate:.2%}, more" in said
    assert "was evicted" in said
    assert advice(hits(specs, 1000, None)[0]), "first uses at least"


def test_advice_on_traces_that_say_little():
    bare = TraceRequest(line=1, timestamp=0, input_length=30, output_length=0)
    schedule = Schedule(step_tokens=64, max_model_len=80)
    cache = VllmReplayedCache(cache_config([spec_from_text("full:4")], 30, schedule))
    (said,) = advice(replay([bare], cache, schedule, Timing()))
    assert said.startswith("100.0% are of prompts that the trace does not name")
    coarse = replay(of_ids((24, [0, 1, 2]), (24, [0, 3, 4])), cache, schedule, Timing())
    assert any("within ids of 8 tokens" in sentence for sentence in advice(coarse))


def test_causes_over_time_are_all_of_the_prompts():
    requests = of_tokens(ABC, range(20, 48), [*ABC, 99], ABC)
    outcome = tight(requests)
    parts = causes_over_time(outcome, np.array([0, 30, outcome.steps]))
    assert parts["evicted"].tolist() == [0, 4]
    assert parts["first use"].tolist() == [12 + 28, 1]
    assert sum(part.sum() for part in parts.values()) == 12 + 28 + 13 + 12


def test_causes_are_what_replays_with_something_changed_find():
    seen = collections.Counter()
    for seed in range(2 * len(proofs.CACHES)):
        seen.update(proofs.check(seed))
    wanted = {EVICTED, NOT_RETAINED, NOT_COMPUTED, "it loses nowhere", "orders compared", "advice compared"}
    assert wanted <= {name for name, count in seen.items() if count}, seen
