"""The search for stores that nothing comes of: what replays of the same prompts find, and the commands that warn."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hkv.contract import registry
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.capacity import planned_tier
from hkv.dialects.vllm.offload.config import BUGS, DROP_PAST_TAIL, WINDOW_PAST_CHUNK, OffloadConfig
from hkv.dialects.vllm.offload.found_again import hits_again, lengths_beyond_windows, warnings
from hkv.dialects.vllm.planning.engine_plan import plan
from hkv.dialects.vllm.schedule.tier import Tier
from hkv.dialects.vllm.schedule.tiered import TieredCache
from hkv.errors import ConfigError
from hkv.oracle.log_file import Log
from hkv.replay.run import Timing, replay
from hkv.replay.schedule import Schedule
from hkv.replay.traces.reader import TraceRequest
from hkv.spec import ChunkedLocal, FullAttention, LayerSpec, Mamba, SlidingWindow
from tests.cli.commands import run
from tests.offload.test_replay import config

FULL, WINDOW = FullAttention(block_size=4), SlidingWindow(block_size=4, window=12)

BLOCKS, ROOM = 1 + 24 * 6, 1_000
"""Blocks of the GPU, as many for each of one to three groups and the null block; chunks that every prompt fits into."""

SCHEDULE = Schedule(step_tokens=BLOCKS, max_running=BLOCKS, max_model_len=256)


def asked_again(tier: OffloadConfig, tokens: int) -> int:
    """Tokens that a replay of a prompt hits when it comes again, once requests of a block each had all of the GPU."""
    groups, prompt = len(tier.chunk_tokens), list(range(tokens))
    others = [[10_000 + each] for each in range(BLOCKS // groups)]
    trace = list[TraceRequest]()
    for turn in range(max(1, tier.threshold) + 1):
        for at, asked in ((0, [prompt]), (2_000, others)):
            now = {"timestamp": 4_000 * turn + at, "output_length": 1, "tokens_per_id": 1}
            trace += [TraceRequest(line=1, input_length=len(each), tokens=each, **now) for each in asked]  # type: ignore[arg-type]
    cache = TieredCache(tier.cache, Tier(config=tier))
    found = replay(trace, cache, dataclasses.replace(SCHEDULE, lookahead=tier.drafts), Timing(step_ms=50), causes=False)
    return found.recorder.requests[len(trace) - len(others) - 1].hit


@st.composite
def tiers(draw: st.DrawFn, chunks: st.SearchStrategy[int]) -> OffloadConfig:
    """Tiers behind one to three groups, with a draft or none."""
    window, chunked = SlidingWindow(block_size=4, window=5), ChunkedLocal(block_size=4, chunk=8)
    kinds = st.sampled_from([FULL, FULL, WINDOW, window, Mamba(block_size=4), chunked])
    specs: list[LayerSpec] = draw(st.lists(kinds, min_size=1, max_size=3))
    drafts = [(group,) for group, spec in enumerate(specs) if spec is not chunked]
    eagle = draw(st.sampled_from([None, None, *drafts]))
    options = {"eagle": eagle, "drafts": 1 if eagle else 0, "threshold": draw(st.sampled_from([0, 0, 2]))}
    options |= {"step_tokens": SCHEDULE.step_tokens, "most_running": SCHEDULE.max_running}
    try:
        return config(specs, BLOCKS, draw(chunks), draw(st.sampled_from([0, 0, 16, None])), **options)  # type: ignore[arg-type]
    except ConfigError:
        assume(False)
        raise


@settings(max_examples=60)
@given(tiers(st.just(ROOM) | st.integers(3, 60)), st.integers(1, 150))
def test_the_search_finds_what_a_replay_of_the_same_prompts_hits(tier: OffloadConfig, tokens: int) -> None:
    assert hits_again(tier, [tokens]) == [asked_again(tier, tokens)]


@settings(max_examples=60)
@given(tiers(st.just(ROOM)))
def test_a_warning_says_the_share_of_lengths_that_hit_and_there_is_none_where_all_do(tier: OffloadConfig) -> None:
    lengths = lengths_beyond_windows(tier, 200)
    hits, said = hits_again(tier, lengths), warnings(tier, 200)
    assert len(said) == (not all(hits))
    share = (
        f"of {len(lengths)} prompt lengths from {lengths[0]} to {lengths[-1]} tokens, {sum(map(bool, hits))} are hit"
    )
    assert all(text.startswith(share) for text in said)


def tier(*specs: LayerSpec, chunks: int = ROOM, retention: int | None = 0, **options: object) -> OffloadConfig:
    more = {"step_tokens": SCHEDULE.step_tokens, "most_running": SCHEDULE.max_running, **options}
    return config(list(specs), BLOCKS, chunks, retention, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("eagle", [(0,), (1,)])
@pytest.mark.parametrize("sizes", [(4, 4), (16, 4)])
def test_beside_a_draft_a_prompt_resumes_a_chunk_earlier_by_contract_and_by_chance_in_vllm(
    eagle: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    specs = (FullAttention(block_size=sizes[0]), SlidingWindow(block_size=sizes[1], window=32))
    vllm = tier(*specs, eagle=eagle, drafts=1)
    contract = dataclasses.replace(vllm, bugs=vllm.bugs - {DROP_PAST_TAIL})
    lengths = lengths_beyond_windows(vllm, 500)
    assert 0 < sum(map(bool, hits_again(vllm, lengths))) < len(lengths)
    for length, hit in zip(lengths, hits_again(contract, lengths), strict=True):
        aligned = contract.resumes_at(length) // sizes[0] * sizes[0]
        assert aligned <= hit <= contract.resumes_at(length)
        assert aligned > length - 2 * max(sizes) - 1
    assert (warnings(contract, 500), DROP_PAST_TAIL in warnings(vllm, 500)[0]) == ([], True)


@pytest.mark.parametrize(("window", "retention", "warned"), [(9, 0, True), (8, 0, False), (9, None, False)])
def test_a_window_of_a_token_more_than_chunks_is_named(window: int, retention: int | None, warned: bool) -> None:
    found = tier(FULL, SlidingWindow(block_size=4, window=window), retention=retention)
    said = warnings(found, 500)
    assert [WINDOW_PAST_CHUNK in text for text in said] == [True] * warned
    assert all(text.endswith("; with dense retention 12") for text in said)
    assert warnings(dataclasses.replace(found, bugs=frozenset()), 500) == []


def test_prompts_without_room_are_warned_of_where_nothing_of_them_is_hit() -> None:
    (said,) = warnings(tier(FULL, chunks=10), 160)
    assert said == (
        "prompts of more than 43 tokens do not fit into 10 chunks: stored alone, 0 of 2 lengths, 44 and 87 tokens, are "
        "hit again"
    )
    assert warnings(tier(FULL, chunks=10), 43) == []
    windows = tier(SlidingWindow(block_size=4, window=12), chunks=10, retention=None, step_tokens=16, most_running=16)
    assert hits_again(windows, [44, 87]) == [43, 76]
    assert warnings(windows, 160) == []


# Commands that warn. What they say is what the next command shows.

CASE = ("tests/data/traces/draft_beside_window.jsonl", "--groups", "full:4,swa:4:8", "--num-blocks", "60", "--offload")
LIMITS = ("400", "--step-tokens", "64", "--max-running", "16", "--max-model-len", "128", "--engine", "numpy")
DRAFT = ("--decode-tokens", "1", "--eagle", "0", "--lookahead", "1")


@pytest.mark.parametrize(("options", "loaded"), [(DRAFT, 0), ((), 20), ((*DRAFT, "--retention", "dense"), 16)])
def test_a_draft_beside_a_window_keeps_the_tier_from_hits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], loaded: int
) -> None:
    _, out, errors = run(monkeypatch, capsys, "replay", *CASE, *LIMITS, *options)
    assert f"{loaded} tokens, loaded" in out
    said = "of 12 prompt lengths from 13 to 24 tokens, 3 are hit again in the tier (draft-drop-misses-window-tail); "
    assert errors.count(f"hkv: warning: {said}with dense retention 12") == errors.count("warning") == (not loaded)


def test_a_replay_without_defects_still_has_those_of_room() -> None:
    found = tier(FULL, SlidingWindow(block_size=4, window=9), chunks=10, bugs=frozenset())
    (said,) = TieredCache(found.cache, Tier(config=found)).warnings(160)
    assert said.startswith("prompts of more than")
    assert asked_again(found, 44) == asked_again(found, 87) == 0
    assert said in warnings(dataclasses.replace(found, bugs=frozenset(BUGS)), 160)


def test_sweeps_warn_of_each_tier(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, found = tmp_path / "t.jsonl", tmp_path / "found.json"
    line = {"timestamp": 0, "input_length": 100, "output_length": 1, "tokens": list(range(100))}
    trace.write_text(json.dumps(line) + "\n")
    cache = ("--groups", "full:16,swa:16:33", "--num-blocks", "50;60", "--offload", "4,20")
    _, _, errors = run(
        monkeypatch, capsys, "sweep", str(trace), *cache, "--engine", "numpy", "--jobs", "1", "--json", str(found)
    )
    where = "hkv: warning: --num-blocks 50 --offload 4: "
    assert errors.count(f"{where}of 48 prompt lengths from 34 to 81 tokens, 15 are hit again") == 1
    assert f"{where}prompts of more than 47 tokens do not fit into 4 chunks" in errors
    assert len(json.loads(found.read_text())["warnings"]) == errors.count("hkv: warning") == 2


def test_a_plan_with_a_draft_warns() -> None:
    """A draft's layer of full attention beside windows of 4,096 tokens."""
    mistral = {"model_type": "mistral", "num_attention_heads": 8, "hidden_size": 512, "vocab_size": 32_000}
    mistral |= {"num_hidden_layers": 2, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
    model, draft = ({**mistral, "sliding_window": window} for window in (4_096, None))
    tiers = [planned_tier(plan(model, "8GiB", draft=each), 8) for each in (None, draft)]
    assert [[DROP_PAST_TAIL in text for text in warnings(each.config, 20_000)] for each in tiers] == [[], [True]]


def test_logs_are_warned_of() -> None:
    full = {"kind": "full_attention", "block_size": 16}
    header = structs.Header(
        dialect=structs.OFFLOAD,
        feature="hand",
        num_blocks=[40, 20],
        groups=[full, {"kind": "sliding_window", "block_size": 16, "window": 33}],
        bugs=sorted(BUGS),
    )
    operations = (structs.RequestOp(id="a", tokens=list(range(70)), output=1),)
    (said,) = registry.dialect_of(structs.OFFLOAD).warnings(Log("log", header, operations))
    assert WINDOW_PAST_CHUNK in said
