"""`hkv replay` and `hkv trace` from the outside: output, files, exit status, and one line for what is wrong."""

import json

import pytest

from hkv.cli import replay as replay_command
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.errors import ConfigError

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 8, "hash_ids": [0, 1]}
MODEL = "tests/data/models/llama.json"
GROUPS = ["--groups", "full:16,swa:16:64", "--num-blocks", "1000"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{**GOOD, "timestamp": 1000 * i, "hash_ids": [0, 1 + i % 3]} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_tables(shell, trace):
    code, out, err = shell("replay", trace, *GROUPS)
    assert code == 0
    assert err.startswith("hkv: warning: ids of 512 tokens, and hits at multiples of 16")
    assert err.count("\n") == 1
    said = ("hit rate", "7,200", "What each group lacked", "nothing to find", "swa:16:64", "Blocks in use over time")
    assert [text for text in (*said, "engine jax") if text not in out] == []


def test_json_and_plots(shell, trace, tmp_path):
    png, svg, made = tmp_path / "a.png", tmp_path / "b.SVG", tmp_path / "a.json"
    code, out, _ = shell(
        "replay", trace, *GROUPS, "--plot", str(png), "--json", str(made), "--eagle", "1",
        "--retention", "0", "--speed", "1/2", "--limit", "10",
    )  # fmt: skip
    assert code == 0
    assert "Replay" in out
    assert png.read_bytes().startswith(b"\x89PNG")
    document = json.loads(made.read_text())
    assert document["options"]["groups"] == "full:16,swa:16:64"
    assert (document["options"]["eagle"], document["options"]["retention"]) == ("1", 0)
    assert document["options"]["speed"] == "1/2"
    assert document["totals"]["requests"] == 10
    assert [group["eagle"] for group in document["groups"]] == [False, True]
    code, out, _ = shell("replay", trace, *GROUPS, "--plot", str(svg), "--json", "-")
    assert code == 0
    assert b"<svg" in svg.read_bytes()
    document = json.loads(out)
    assert document["totals"]["hit_tokens"] == sum(document["requests"]["hit"]) > 0
    assert document["totals"]["hit_rate"] == document["totals"]["hit_tokens"] / 7200


def test_a_difference_ends_with_1(shell, monkeypatch, trace):
    def disagree(*arguments, **options):
        raise replay_command.Difference(7, "lookup", "3", "hit", {"jax": 16, "numpy": 32})

    monkeypatch.setattr(replay_command, "replay", disagree)
    code, _, err = shell("replay", trace, *GROUPS)
    assert code == 1
    assert "operation 7, lookup of request 3: hit differs: jax: 16; numpy: 32" in err


def test_an_engine_that_cannot_tell_why_says_so(shell, monkeypatch, trace):
    class Silent(NumpyEngine):
        absence = None
        evictions = None

    monkeypatch.setattr("hkv.replay.run.engine_factory", lambda name: Silent)
    code, out, _ = shell("replay", trace, *GROUPS, "--engine", "numpy")
    assert code == 0
    assert out.count("not available from this engine: numpy") == 2


def test_a_cache_that_is_not_compiled_is_replayed_by_numpy_and_said_so(shell, monkeypatch, trace):
    def refuse(cache):
        raise ConfigError("num_blocks", cache.blocks, "a pool that the compiled schedule has rules for")

    monkeypatch.setattr("hkv.dialects.vllm.schedule.run.VllmReplayedCache.require_compiled", refuse)
    code, out, err = shell("replay", trace, *GROUPS, "--limit", "4")
    assert code == 0
    assert "engine numpy" in out
    assert err.startswith("hkv: engine numpy: num_blocks = ")
    assert [line for line in err.splitlines()[1:] if not line.startswith("hkv: warning: ids of 512 tokens")] == []
    code, _, err = shell("replay", trace, *GROUPS, "--engine", "jax")
    assert code == 2
    assert "num_blocks = " in err


@pytest.mark.parametrize("workload", ["chat", "shared-prefix", "agentic"])
@pytest.mark.parametrize("format", ["mooncake", "tokens"])
def test_generated_traces_replay(shell, tmp_path, workload, format):
    path = tmp_path / "made.jsonl"
    small = [
        "--requests",
        "25",
        "--seed",
        "3",
        "--prefix-tokens",
        "300",
        "--prompt-tokens",
        "40",
        "--output-tokens",
        "10",
    ]
    ids = ("--tokens-per-id", "32", "--json", "-")
    code, out, _ = shell("trace", workload, "-o", str(path), *small, "--output-tokens", "10", "--format", format, *ids)
    assert code == 0
    told = json.loads(out)
    assert told["totals"]["requests"] == 25
    assert told["prefix_tokens"] == 300
    code, out, _ = shell("replay", str(path), *GROUPS, *ids)
    assert code == 0
    replayed = json.loads(out)
    assert replayed["totals"]["prompt_tokens"] == told["totals"]["prompt_tokens"]
    assert replayed["totals"]["output_tokens"] == told["totals"]["output_tokens"]
    assert replayed["totals"]["hit_tokens"] > 0


RESOLVED = {
    ("--retention", "dense", "--no-caching"): {"prefix_cache_retention_interval": None, "enable_prefix_caching": False},
    ("--device", "h100"): {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "prefix_cache_retention_interval": 0},
    ("--step-tokens", "64", "--max-running", "7", "--max-model-len", "4096"): {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 7,
        "max_model_len": 4096,
        "enable_prefix_caching": True,
    },
    ("--tp", "2", "--kv-dtype", "fp8", "--block-size", "32"): {
        "tensor_parallel_size": 2,
        "cache_dtype": "fp8",
        "block_size": 32,
        "model": MODEL,
    },
}
"""Options of a replay, and fields of vLLM's `EngineArgs`."""


def resolved(options):
    cache = ["--model", MODEL, "--memory", "3GiB"] if "--tp" in options else GROUPS
    with replay_command.command.make_context("replay", [MODEL, *cache, *options]) as context:
        return replay_command.prepared(context.params).resolved.split()


@pytest.mark.parametrize("options", RESOLVED)
def test_the_options_of_vllm_serve_are_said(options):
    said = resolved(options)
    assert said[:2] == ["vllm", "serve"]
    for field, value in RESOLVED[options].items():
        option = "--kv-cache-dtype" if field == "cache_dtype" else f"--{field.replace('_', '-')}"
        if field == "model":
            assert said[2] == value
        elif isinstance(value, bool):
            assert (option if value else option.replace("--", "--no-")) in said
        else:
            assert said[said.index(option) + 1] == str(value)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", RESOLVED)
def test_vllm_takes_the_options_that_are_said(options):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    found = parser.parse_args(resolved(options)[3 if "model" in RESOLVED[options] else 2 :])
    for field, value in RESOLVED[options].items():
        if field != "model":
            assert getattr(found, "kv_cache_dtype" if field == "cache_dtype" else field) == value


def test_what_rtp_llms_options_came_to_be_is_said(shell, trace):
    options = ("--groups", "full:16", "--num-blocks", "300", "--dialect", "rtp-llm/single", "--engine", "numpy")
    _, out, _ = shell("replay", trace, *options)
    assert "blocks of 16 tokens, states kept every 1, 5 % of the blocks in reserve" in " ".join(out.split())
