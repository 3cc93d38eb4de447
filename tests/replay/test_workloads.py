"""Generated workloads: in order, repeatable, shared as their kind says, and the same in both formats."""

import json

import numpy as np
import pytest

from hkv.errors import ConfigError
from hkv.replay.traces.reader import NewRequest, read_trace
from hkv.replay.traces.workloads import DEFAULTS, FORMATS, Workload, generate, trace_lines

KINDS = list(DEFAULTS)


def small(**changes):
    settings = {
        "requests": 150,
        "rate": 5.0,
        "prefix_tokens": 60,
        "prompt_tokens": 20,
        "output_tokens": 20,
        "pause": 1.0,
    }
    return Workload(**{**settings, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_in_order_repeatable_and_of_the_size_asked_for(kind):
    requests = list(generate(kind, small(), seed=7))
    again = list(generate(kind, small(), seed=7))
    assert len(requests) == 150
    times = [request.timestamp for request in requests]
    assert times == sorted(times)
    for one, two in zip(requests, again, strict=True):
        assert one.timestamp == two.timestamp
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.output_tokens.tolist() == two.output_tokens.tolist()
    other = list(generate(kind, small(), seed=8))
    assert [request.tokens.tolist() for request in other] != [request.tokens.tolist() for request in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_around_their_means_and_within_the_limit(kind):
    workload = small(requests=600, max_tokens=400)
    requests = list(generate(kind, workload, seed=1))
    outputs = [len(request.output_tokens) for request in requests]
    assert 15 <= sum(outputs) / len(outputs) <= 25
    assert all(
        len(request.tokens) > 0 and len(request.tokens) + len(request.output_tokens) <= 400 for request in requests
    )


def test_chats_carry_all_that_was_said_before():
    requests = list(generate("chat", small(prefixes=1, turns=5.0, rate=0.2, requests=400), seed=2))
    whole = [list(request.tokens) + list(request.output_tokens) for request in requests]
    continued = sum(any(list(later.tokens[: len(said)]) == said for later in requests) for said in whole)
    assert continued / len(requests) == pytest.approx(1 - 1 / 5.0, abs=0.15)


def test_single_requests_share_system_prompts_the_first_most():
    requests = list(generate("shared-prefix", small(prefixes=4, requests=400), seed=3))
    starts = [tuple(request.tokens[:8]) for request in requests]
    counts = sorted((starts.count(start) for start in set(starts)), reverse=True)
    assert len(counts) == 4
    assert counts[0] / 400 == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.1)
    assert not any(
        list(requests[0].output_tokens) == list(request.tokens[-len(requests[0].output_tokens) :])
        for request in requests
    )


def test_agents_branch():
    straight = list(generate("agentic", small(prefixes=1, turns=6.0, branch_percent=0), seed=4))
    branched = list(generate("agentic", small(prefixes=1, turns=6.0, branch_percent=60), seed=4))

    def forks(requests):
        """Answers after which later requests go on in more than one way."""
        count = 0
        for request in requests:
            said = [*request.tokens, *request.output_tokens]
            later = {int(other.tokens[len(said)]) for other in requests if list(other.tokens[: len(said)]) == said}
            count += len(later) > 1
        return count

    assert forks(straight) == 0
    assert forks(branched) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_both_formats_tell_the_same_story(kind, tmp_path):
    read = {}
    for format in FORMATS:
        path = tmp_path / f"{format}.jsonl"
        lines = trace_lines(generate(kind, small(), seed=5), format, tokens_per_id=16)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        read[format] = list(read_trace(str(path), tokens_per_id=16))
    for ids, tokens in zip(read["mooncake"], read["tokens"], strict=True):
        assert (ids.timestamp, ids.input_length, ids.output_length) == (
            tokens.timestamp,
            tokens.input_length,
            tokens.output_length,
        )
        assert len(ids.hash_ids) == -(-ids.input_length // 16)
    first = read["mooncake"][0]
    for later, named in zip(read["mooncake"][1:], read["tokens"][1:], strict=True):
        alike = sum(one == two for one, two in zip(first.hash_ids, later.hash_ids, strict=False))
        here, there = read["tokens"][0].tokens, named.tokens
        same = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:
            assert alike == same // 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("requests", 0), ("rate", 0.0), ("rate", float("nan")), ("prefixes", 0), ("prefix_tokens", -1),
        ("prompt_tokens", 0), ("output_tokens", 0), ("turns", 0.5), ("pause", -1.0),
        ("branch_percent", 101),
        ("max_tokens", 1),
    ],
)  # fmt: skip
def test_impossible_workloads_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Workload(**{name: value})


def test_unknown_kinds_formats_and_seeds_are_refused():
    with pytest.raises(ConfigError, match="workload"):
        generate("poems", Workload(), 0)
    with pytest.raises(ConfigError, match="seed"):
        generate("chat", Workload(), -1)
    with pytest.raises(ConfigError, match="format"):
        list(trace_lines([], "csv", 16))


def test_equal_blocks_after_different_prefixes_have_different_ids():
    def request(*tokens):
        return NewRequest(
            line=1, timestamp=0, input_length=len(tokens), output_length=0, tokens=np.array(tokens, np.uint32)
        )

    lines = trace_lines([request(1, 2, 5, 6, 7), request(3, 4, 5, 6), request(1, 2, 5, 6, 7)], "mooncake", 2)
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2], [3, 4], [0, 1, 2]]
