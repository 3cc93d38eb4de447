"""`hkv plan`: what it prints and writes, what it refuses, and what it does not import."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.cli.plan import command
from hkv.errors import ConfigError, HKVError, PlanError
from hkv.limits import parse_bytes, show_bytes

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "tests" / "data" / "models"


def plan(name: str, *arguments: str, memory: str = "80GiB") -> dict:
    line = [str(MODELS / f"{name}.json"), "--memory", memory, *arguments, "--json", "-"]
    result = CliRunner().invoke(command, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_groups_blocks_and_tensors_of_a_hybrid_model() -> None:
    report = plan("qwen3_next")
    assert [group["class"] for group in report["groups"]] == ["Mamba", "Mamba", "Mamba", "FullAttention"]
    assert {group["block_size"] for group in report["groups"]} == {576}
    assert {group["bytes_per_block"] for group in report["groups"]} == {12 * 576 * 2048}
    assert [group["padding_bytes"] for group in report["groups"]] == [12 * (576 * 2048 - 1097728)] * 3 + [0]
    assert report["num_blocks"] == (80 << 30) // (12 * 576 * 2048)
    per_request = 3 * (2 + 1) + -(-32768 // 576)
    assert report["fits"]["requests"] == (report["num_blocks"] - 1) // per_request
    (tensors,) = report["tensors"]
    assert len(tensors) == 4
    assert tensors[3]["shape"] == [12, report["num_blocks"], 2, 576, 1024]
    assert tensors[3]["strides"][:2] == [576 * 2048 * report["num_blocks"], 576 * 2048]


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_every_model_has_a_plan_that_prints_whole_in_80_columns(name: str, ranks: str) -> None:
    line = [str(MODELS / f"{name}.json"), "--memory", "80GiB", "--tp", ranks]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(command, line, catch_exceptions=False)
    assert result.exit_code == 0
    assert re.search(r"^fits  .* requests of .* tokens at once", result.output, re.MULTILINE)
    assert re.search(r"^limited by  memory: ", result.output, re.MULTILINE)
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output, "nothing is cut off"
    report = plan(name, "--tp", ranks)
    words = set(result.output.replace(",", "").split())
    for tensor in (tensor for stage in report["tensors"] for tensor in stage):
        assert {str(number) for number in (*tensor["shape"], *tensor["strides"], tensor["offset"])} <= words


@pytest.mark.parametrize("dialect", ["vllm-0.33", "rtp-llm"])
def test_unknown_fields_are_noted_ignored_or_refused(dialect: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.json"
    fields = json.loads((MODELS / "llama.json").read_text())
    file.write_text(json.dumps(fields | {"rswa_window": 64, "num_kv_heads": 4, "post_norm": True}))
    line = [str(file), "--memory", "80GiB", "--dialect", dialect, "--json", "-"]
    with pytest.raises(ConfigError, match=r"rswa_window, num_kv_heads = \[64, 4\]: expected .*vLLM reads them"):
        CliRunner().invoke(command, line, catch_exceptions=False)
    line += ["--ignore-field", "rswa_window,num_kv_heads"]
    notes = json.loads(CliRunner().invoke(command, line, catch_exceptions=False).output)["model"]["notes"]
    assert "ignored, as asked: rswa_window = 64, num_kv_heads = 4" in notes
    assert "no part of the cache, as vLLM 0.33 builds Llama: post_norm = true" in notes
    with pytest.raises(ConfigError, match=r"post_norm = True: expected .*\(strict\)"):
        CliRunner().invoke(command, [*line, "--strict"], catch_exceptions=False)


def test_rtp_llm_says_what_its_own_groups_cost() -> None:
    """Scales, packed latents and padding are bytes of a token, whatever another engine's cost."""
    report = plan("deepseek_v3", "--dialect", "rtp-llm", "--kv-dtype", "fp8_ds_mla")
    assert (report["num_blocks"], report["groups"][0]["block_bytes"]) == (33541, 41984)
    assert (report["model"]["token_bytes"], report["model"]["token_bytes_if_all_full"]) == (40016, 40016)
    report = plan("llama", "--dialect", "rtp-llm", "--kv-dtype", "fp8")
    assert (report["model"]["token_bytes"], report["model"]["token_bytes_if_all_full"]) == (270336, 270336)
    pools = plan("deepseek_v4", "--dialect", "rtp-llm", "--pools", "independent", "--dcp", "4")
    assert (pools["model"]["token_bytes"], pools["model"]["token_bytes_if_all_full"]) == (3740.25 / 4, 43 * 584 / 4)
    assert min(group["padding_bytes"] for group in pools["groups"]) >= 0
    assert {group["tag"]: group["padding_bytes"] for group in pools["groups"]}["swa_kv"] == 128
    hybrid = plan("qwen3_next", "--dialect", "rtp-llm", "--block-size", "1024")
    assert (hybrid["model"]["token_bytes"], hybrid["model"]["sequence_bytes"]) == (24576, 2 * 36 * 2097152)


def test_rtp_llm_has_one_float8() -> None:
    """`fp8_e4m3` stands in the list of its types, and was refused as vLLM's."""
    for name, fp8 in (("llama", "fp8"), ("deepseek_v3", "fp8_ds_mla")):
        found = [plan(name, "--dialect", "rtp-llm", "--kv-dtype", dtype) for dtype in ("fp8_e4m3", fp8)]
        assert found[0]["groups"] == found[1]["groups"]
        assert "float8_e4m3fn" in {
            found[0]["layer_caches"]["0"][0]["parts"][part]["dtype"]
            for part in ("key", "latent")
            if part in found[0]["layer_caches"]["0"][0]["parts"]
        }


def test_rtp_llm_keeps_states_in_its_servers_type() -> None:
    """bfloat16, whatever the config says, unless the server's flag says otherwise."""
    asked = ("qwen3_5_moe_text", "--dialect", "rtp-llm", "--block-size", "1088")
    found = {dtype: plan(*asked, *(["--state-dtype", dtype] if dtype else [])) for dtype in ("", "bfloat16", "float32")}
    state = {name: report["layer_caches"]["0"][0]["parts"]["state"]["dtype"] for name, report in found.items()}
    assert state == {"": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
    with pytest.raises(HKVError, match="state_dtype = 'float16': expected one of RTP-LLM's: bfloat16, float32"):
        plan(*asked, "--state-dtype", "float16")


def test_rtp_llm_takes_the_smallest_block_that_fits_where_none_is_asked_for() -> None:
    report = plan("qwen3_5_moe_text", "--dialect", "rtp-llm")
    (full, *states) = report["groups"]
    assert full["block_size"] == 576
    assert full["block_bytes"] >= states[0]["block_bytes"] > full["block_bytes"] * 512 // 576
    assert any(note.startswith("block size: 576, the smallest multiple of 64") for note in report["model"]["notes"])
    with pytest.raises(HKVError, match="not padded"):
        plan("qwen3_5_moe_text", "--dialect", "rtp-llm", "--block-size", "512")
    assert plan("llama", "--dialect", "rtp-llm")["groups"][0]["block_size"] == 64
    windows = plan("gemma3_text", "--dialect", "rtp-llm")
    assert windows["pools"] == "independent"
    assert any(note.startswith("pools: one a group") for note in windows["model"]["notes"])


def test_rtp_llm_says_how_many_requests_fit() -> None:
    line = [str(MODELS / "gemma3_text.json"), "--memory", "80GiB", "--dialect", "rtp-llm", "--max-model-len", "8k"]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(command, [*line, "--reserve-ratio", "0"], catch_exceptions=False)
    assert "12,603 of 1 MiB and 5.5 MiB of windows, block 0 reserved" in result.output
    assert "requests     100 of 8,000 tokens at once, without reuse, beside 0 % in reserve" in result.output
    with pytest.raises(HKVError, match=r"groups = \['swa'\]: expected .* no pools of windows alone"):
        plan("mistral", "--dialect", "rtp-llm")
    with pytest.raises(HKVError, match="a number of tokens with --dialect rtp-llm"):
        plan("llama", "--dialect", "rtp-llm", "--max-model-len", "auto")


def test_rtp_llm_deals_blocks_out_to_ranks() -> None:
    """Blocks cost what they cost on one rank; what they hold of a sequence grows with the ranks, states do not."""
    asked = ("qwen3_next", "--dialect", "rtp-llm", "--block-size", "1024")
    alone, dealt = plan(*asked), plan(*asked, "--dcp", "4")
    assert dealt["num_blocks"] == alone["num_blocks"]
    assert (alone["ranks"], alone["token_capacity"]) == (1, (alone["num_blocks"] - 1) * 1024)
    assert dealt["token_capacity"] == 4 * alone["token_capacity"]
    assert {group["type"]: group["tokens_per_slot"] for group in dealt["groups"]} == {"FULL": 4096, "LINEAR": 1024}
    asked = ("deepseek_v4", "--dialect", "rtp-llm", "--pools", "independent")
    alone, dealt = plan(*asked), plan(*asked, "--dcp", "2")
    for one, each in zip(alone["groups"], dealt["groups"], strict=True):
        assert each["tokens_per_slot"] == 2 * one["tokens_per_slot"], "windows and states are sized for all ranks"
        stored = one["payload_bytes"] if one["type"] == "FULL" else -(-one["payload_bytes"] // 2)
        assert each["block_bytes"] >= stored - 1024
        assert each["block_bytes"] < one["block_bytes"] or one["type"] == "FULL", "a prefill rank stores its slice"


def test_rtp_llm_notes_an_indexer_without_room() -> None:
    line = [str(MODELS / "deepseek_v32.json"), "--memory", "80GiB", "--dialect", "rtp-llm"]
    for more, noted in (("--pools", "shared"), False), (("--pools", "independent"), True):
        result = CliRunner(env={"COLUMNS": "160"}).invoke(command, [*line, *more], catch_exceptions=False)
        assert (
            "indexer-without-room: RTP-LLM lacks the indexer's keys of 61 layers from 0 on" in result.output
        ) is noted


def test_rtp_llm_drafts(tmp_path: pathlib.Path) -> None:
    draft = json.loads((MODELS / "llama.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(draft))
    arguments = ["--dialect", "rtp-llm", "--draft", str(tmp_path), "--draft-modules", "2"]
    report = plan("llama", *arguments)
    assert [[group["layers"] for group in module] for module in report["draft_modules"]] == [[[32]], [[33]]]
    line = [str(MODELS / "llama.json"), "--memory", "80GiB", *arguments]
    assert "2 modules: layers 32, 33 in default" in CliRunner().invoke(command, line, catch_exceptions=False).output


@pytest.mark.parametrize(
    ("name", "options", "headings"),
    [
        ("llama", [], "group type kind layers"),
        ("qwen3_next", ["--pools", "independent"], "group type kind layers"),
        ("deepseek_v4", ["--pools", "independent", "--kernel-block-size", "128"], "kernel bytes"),
        ("llama", ["--kv-dtype", "fp8"], "padding scales blocks"),
    ],
)
def test_rtp_llm_prints_whole_in_80_columns(name: str, options: list[str], headings: str) -> None:
    line = [str(MODELS / f"{name}.json"), "--memory", "80GiB", "--dialect", "rtp-llm", *options]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(command, line, catch_exceptions=False)
    assert "block 0 reserved" in result.output
    assert "…" not in result.output, "nothing is cut off"
    assert set(headings.split()) <= set(result.output.split())
    report = plan(name, "--dialect", "rtp-llm", *options)
    for group in report["groups"]:
        assert {group["tag"], f"{group['stride']:,}", f"{group['num_blocks']:,}"} <= set(result.output.split())


@pytest.mark.parametrize("dialect", ["vllm-0.33", "rtp-llm"])
def test_an_unknown_element_type_names_its_file(dialect: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((MODELS / "llama.json").read_text()) | {"dtype": "int3"}))
    with pytest.raises(HKVError, match=f"{re.escape(str(path))}: dtype = 'int3': expected one of bool, "):
        CliRunner().invoke(command, [str(path), "--memory", "80GiB", "--dialect", dialect], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("7", 7), ("4G", 4 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "0", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    sizes = {0: "0 B", 5: "5 B", 2048: "2 KiB", 3684.9375: "3.6 KiB", 436_207_616: "416 MiB", 3 << 39: "1.5 TiB"}
    assert {size: show_bytes(size) for size in sizes} == sizes


# `hkv plan --requests N`: the fewest GPUs that hold so many requests at once.

LENGTH = ("--gpu", "h100", "--max-model-len", "32k")


def asked(*words: str) -> dict[str, Any]:
    found = CliRunner().invoke(cli, ["plan", *words, *LENGTH, "--json", "-"], catch_exceptions=False)
    return json.loads(found.output)


def test_the_fewest_gpus_hold_the_requests_and_fewer_do_not() -> None:
    answer = asked("llama-3.1-8b", "--requests", "40")
    best = answer["fewest"]
    assert best["engines"] * best["requests"] >= 40
    assert best["gpus"] == best["tp"] * best["pp"] * best["engines"] == min(d["gpus"] for d in answer["deployments"])
    for each in answer["deployments"]:
        assert (each["engines"] - 1) * each["requests"] < 40
    assert f"--tensor-parallel-size {best['tp']}" in answer["serve"]


def test_given_ranks_are_the_only_ones_tried() -> None:
    answer = asked("llama-3.1-8b", "--requests", "40", "--tp", "1,2")
    assert {each["tp"] for each in answer["deployments"]} == {1, 2}


def test_stages_are_tried_where_ranks_do_not_hold_the_weights() -> None:
    assert asked("deepseek-v3", "--requests", "1")["fewest"]["pp"] > 1


def test_refusals() -> None:
    with pytest.raises(PlanError, match=r"131\.42 GiB of weights"):
        asked("llama-3.1-70b", "--requests", "1", "--tp", "1", "--pp", "1")
    with pytest.raises(ConfigError, match="one model"):
        asked("llama-3.1-8b", "qwen3-8b", "--requests", "1")
