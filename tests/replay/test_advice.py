"""Each sentence of advice is a command: with the options that it names, `hkv replay` finds what it says.

Drawn over dialects, groups, pools and schedules, with and without a second tier; a plan of a model has its own options.
"""

import json
import pathlib
import random
import re

import msgspec
from click.testing import CliRunner

from benchmarks import causes as proofs
from hkv.cli import cli
from hkv.replay.verb import replay_trace
from hkv.spec import spec_from_text

SENTENCE = re.compile(r"([^:]*?) \((--[^)]*)\)(?: hits|:) ([0-9.]+)%(?:, (more|less|the same))?")
"""The change, the options that make it, the rate that they hit, and how that compares."""

TIERS = (
    "",
    "--offload 40",
    "--offload 300 --offload-policy arc",
    "--offload 300 --offload-store-threshold 2",
    "--offload 300 --offload-decode",
    "--offload 200 --offload-kind lmcache --offload-chunk-tokens 16",
)

MADE = {
    "vllm-0.33": {
        "A pool that evicts nothing",
        "Dense retention",
        "Blocks of",
        "Offloading without vLLM's defects",
        "A tier that evicts nothing",
        "No second tier",
    },
    "rtp-llm/single": {"A pool that evicts nothing"},
    "rtp-llm/hybrid": {"A pool that evicts nothing", "States kept at every block"},
    "rtp-llm/hybrid-pool": {"A pool that evicts nothing"},
    "sglang-0.5.23": {"A pool that evicts nothing"},
}
"""Changes of each dialect, all of which the draws meet."""


def command_of(seed: int) -> str:
    """Options of a drawn replay."""
    source = random.Random(seed)
    dialect, text, (least, most) = proofs.CACHES[seed % len(proofs.CACHES)]
    blocks, words = source.randint(least, most), [f"--dialect {dialect} --groups {text} --engine numpy"]
    pools = f"{blocks},{40 if 'mamba' in text else blocks // 2}" if dialect.startswith("sglang") and "," in text else ""
    words += [f"--num-blocks {pools or blocks}", f"--step-tokens {source.choice((16, 64))}"]
    words += ["--max-running 8 --max-model-len 240", f"--closed-loop {source.choice((0, 0, 3))}"]
    if dialect == "vllm-0.33":
        words += [f"--retention {source.choice(('dense', '0', '0', '32' if 'swa' in text else '0'))}"]
        words += [source.choice(TIERS)]
        words += ["--prefix-match-unit 2"] if source.random() < 0.2 and "," in text else []
    elif "mamba" in text and dialect.startswith("rtp"):
        words += [f"--linear-step {source.choice((1, 2, 4))}"]
    return " ".join(words)


def written(seed: int, folder: pathlib.Path) -> str:
    """Path of a drawn trace."""
    path = folder / f"{seed}.jsonl"
    path.write_bytes(
        b"".join(
            msgspec.json.encode(
                {
                    "timestamp": each.timestamp,
                    "tokens": list(each.tokens),
                    "output_length": each.output_length,
                    "output_tokens": list(each.output_tokens),
                }
            )
            + b"\n"
            for each in proofs.drawn(seed).trace.requests
        )
    )
    return str(path)


def replayed(words: str) -> dict:
    done = CliRunner().invoke(cli, f"replay {words} --json -")
    assert done.exit_code == 0, (words, done.output)
    return json.loads(done.stdout)


def hold(words: str) -> set[str]:
    """Holds each sentence of a replay's advice to the command that it names; returns what they change."""
    first, met = replayed(f"{words} --ceilings"), set()
    mine = first["totals"]["hit_rate"]
    rates = {mine: ""}
    for sentence in first["advice"]:
        said = SENTENCE.search(sentence)
        assert bool(said) == bool(re.search(r"(hits|:) [0-9.]+%", sentence)), sentence
        if said is None:
            continue
        change, options, figure, word = said.groups()
        found = replayed(f"{words} {options}")["totals"]
        assert f"{found['hit_rate']:.2%}" == f"{figure}%", (words, sentence)
        compared = "more" if found["hit_rate"] > mine else "less" if found["hit_rate"] < mine else "the same"
        assert word in (None, compared), (words, sentence)
        if "evicts nothing" in sentence and "still" not in sentence:
            assert found["tier_evicted" if "tier" in change else "evictions"] == 0, (words, sentence)
        if word:
            rates.setdefault(found["hit_rate"], change)
            met.add(change)
    best = rates[max(rates)]
    if len(met) > 1:
        assert first["advice"][-1] == (f"Most is found by this: {best}." if best else "None of these finds more.")
    assert all(each["options"] for each in first["ceilings"])
    assert len(first["ceilings"]) == len(met), (words, first["advice"])
    return met


def test_each_sentence_of_advice_is_a_command(tmp_path: pathlib.Path) -> None:
    met: dict[str, set[str]] = {dialect: set() for dialect in MADE}
    for seed in range(2 * len(proofs.CACHES)):
        words = command_of(seed)
        met[words.split()[1]].update(hold(f"{written(seed, tmp_path)} {words}"))
    for dialect, changes in MADE.items():
        assert all(any(change in each for each in met[dialect]) for change in changes), (dialect, met[dialect])


def test_a_tier_stays_when_something_else_is_changed() -> None:
    """Ten prompts in turn through a pool that holds four of them, and a tier that holds all."""
    words = "--groups full:64,swa:64:128 --num-blocks 40 --offload 400 --engine numpy"
    hold(f"tests/data/traces/ceilings_tier.jsonl {words}")
    (dense,) = (
        each
        for each in replayed(f"tests/data/traces/ceilings_tier.jsonl {words} --ceilings")["ceilings"]
        if each["options"] == {"retention": "dense"}
    )
    assert f"{dense['hit_rate']:.2%}" == "61.11%"


def test_advice_on_a_plan_of_a_model_is_in_its_options(tmp_path: pathlib.Path) -> None:
    words = "--model tests/data/models/gemma3_text.json --block-size 16 --max-model-len 256 --engine numpy"
    for tier in ("", "--offload 64MiB"):
        assert hold(f"{written(4, tmp_path)} {words} --memory 96MiB {tier}")


def test_a_call_takes_a_tier_as_the_command_does() -> None:
    groups, trace = [spec_from_text("full:64"), spec_from_text("swa:64:128")], "tests/data/traces/ceilings_tier.jsonl"
    found = replay_trace(trace, groups, 40, engine="numpy", dialect_options={"offload": "400", "retention": "dense"})
    assert f"{found.totals['hit_rate']:.2%}" == "61.11%"


def test_coarse_ids_warn_where_windows_are_kept_and_say_what_finer_ones_can_hit_at_most(tmp_path: pathlib.Path) -> None:
    words = "--num-blocks 4000 --engine numpy"
    for groups, hybrid in (("full:16,swa:16:128", True), ("full:16", False)):
        rates, said = {}, {}
        for size in (512, 16):
            path = str(tmp_path / f"{size}.jsonl")
            made = f"trace chat -o {path} --requests 60 --tokens-per-id {size} --seed 3"
            assert CliRunner().invoke(cli, made).exit_code == 0
            found = replayed(f"{path} --groups {groups} {words}")
            rates[size], said[size] = found["totals"]["hit_rate"], found
        assert bool(said[512]["warnings"]) == hybrid
        assert not said[16]["warnings"]
        bounds = re.findall(r"finer ones may hit up to ([0-9.]+)% in all", " ".join(said[512]["advice"]))
        assert bool(bounds) == hybrid
        if hybrid:
            assert rates[512] < rates[16] <= float(bounds[0]) / 100 + 0.0005
            gain = (rates[16] - rates[512]) * said[512]["totals"]["prompt_tokens"]
            assert gain > 0


def test_a_sweep_over_tiers_takes_none_for_its_baseline() -> None:
    trace = "tests/data/traces/ceilings_tier.jsonl --groups full:64,swa:64:128 --num-blocks 40 --engine numpy"
    done = CliRunner().invoke(cli, f"sweep {trace} --offload 0,400 --json -")
    assert done.exit_code == 0, done.output
    alone, tier = (line["points"][0] for line in json.loads(done.stdout)["lines"])
    assert alone["hit_rate"] == replayed(trace)["totals"]["hit_rate"]
    assert alone["loaded_tokens"] == 0 < tier["loaded_tokens"]
    assert "loaded_tokens" in tier


def test_the_command_of_a_model_with_a_tier_has_its_size(tmp_path: pathlib.Path) -> None:
    words = "--model tests/data/models/gemma3_text.json --memory 96MiB --max-model-len 256 --engine numpy"
    found = replayed(f"{written(4, tmp_path)} {words} --offload 512MiB")["resolved"]
    assert "--kv-offloading-size 0.5 --kv-offloading-backend native" in found
    assert "offloading" not in replayed(f"{written(4, tmp_path)} {words} --offload 0")["resolved"]
    done = CliRunner().invoke(cli, f"replay {written(4, tmp_path)} {words} --offload 1x")
    assert str(done.exception).startswith("offload = ")
