"""`hkv plan` of several models and options: every row is what the plan alone says, and what is refused says why."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hkv.cli.plan import command
from hkv.errors import ConfigError, FileError, PlanError

MODELS = ("gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b-a3b", "llama-3.1-8b")
OPTIONS = ("--tp", "1,2", "--kv-cache-dtype", "auto,fp8", "--max-model-len", "8192,131072")


def run(*arguments: str, memory: str = "80GiB", **environment: str) -> Result:
    line = [*arguments, "--memory", memory]
    return CliRunner(env={"COLUMNS": "80", **environment}).invoke(command, line, catch_exceptions=False)


def rows(*arguments: str, memory: str = "80GiB") -> list[dict[str, Any]]:
    result = run(*arguments, "--json", "-", memory=memory)
    assert result.exit_code == 0
    return json.loads(result.output)["rows"]


def alone(row: dict[str, Any], memory: str = "80GiB") -> dict[str, Any]:
    """The plan of a row's model and options, by itself."""
    options = {"--tp": row["tp"], "--kv-cache-dtype": row["kv_dtype"], "--max-model-len": row["max_model_len"]}
    words = (str(word) for pair in options.items() for word in pair)
    result = run(row["model"], *words, "--json", "-", memory=memory)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_row_is_what_the_plan_alone_says() -> None:
    found = rows(*MODELS, *OPTIONS)
    assert len(found) == len(MODELS) * 8
    assert [row["model"] for row in found[::8]] == list(MODELS)
    for row in found[::3]:
        report = alone(row)
        held = sum(group["full_length_blocks"] for group in report["groups"])
        assert row["num_blocks"] == report["num_blocks"]
        assert row["requests"] == report["fits"]["requests"]
        assert row["limited_by"] == report["fits"]["limited_by"]
        assert row["token_bytes"] == report["model"]["token_bytes"]
        assert row["sequence_bytes"] == report["model"]["sequence_bytes"]
        assert row["requests"] * held < row["num_blocks"]
        assert row["tokens"] == int(row["concurrency"] * row["max_model_len"])
        assert row["refused"] is None


def test_the_csv_is_the_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "capacity.csv"
    found = rows(*MODELS, "whisper-large-v3", *OPTIONS, "--csv", str(path))
    lines = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    assert len(lines) == len(found)
    for line, row in zip(lines, found, strict=True):
        assert {name: value for name, value in line.items() if value} == {
            name: str(value) for name, value in row.items() if value is not None
        }


def test_a_refused_combination_is_a_row_with_its_reason() -> None:
    found = rows("devstral-2-123b", "--kv-cache-dtype", "auto,fp8", "--max-model-len", "8192,262144")
    assert [row["refused"] is None for row in found] == [True, False, True, True]
    assert "requests of 238288 tokens would fit" in found[1]["refused"]
    assert found[1]["max_model_len"] == "262144"
    output = run("devstral-2-123b", "llama-3.2-1b", "--max-model-len", "8192,262144").output
    assert "refused: memory = 85899345920" in output


def test_what_all_rows_are_refused_for_is_the_commands_own_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        run("llama-3.1-8b", "llama-3.2-1b", "--kv-cache-dtype", "float3")
    with pytest.raises(PlanError, match="memory"):
        run("llama-3.1-8b", "--csv", str(tmp_path / "x.csv"), memory="1MiB")
    assert not list(tmp_path.iterdir())


def test_a_name_that_nobody_knows_is_no_row() -> None:
    with pytest.raises(FileError, match="such as llama-3"):
        run("llama-3.1-8b", "llama-3.1-7b")


@pytest.mark.parametrize("values", ["", "1,", ",1", "1,1", "1,x", "0,1"])
def test_values_that_are_no_list(values: str) -> None:
    result = run("llama-3.1-8b", "--tp", values)
    assert result.exit_code == 2
    assert "--tp" in result.output


def test_the_table_fits_80_columns() -> None:
    lines = run(*MODELS, *OPTIONS).output.splitlines()
    assert len(lines) == 2 + len(MODELS) * 9
    assert max(map(len, lines)) <= 80
    start = lines.index("gemma-3-27b")
    columns = lines[start + 1].split()
    assert columns[:5] == ["1", "auto", "8,192", "80KiB", "416MiB"]
    shifted = {line.rindex(" ") for line in lines[start + 1 : start + 9]}
    assert len(shifted) == 1, "columns are aligned"


def test_one_combination_is_a_plan_and_a_file_for_it_a_table(tmp_path: pathlib.Path) -> None:
    assert run("gpt-oss-20b", "--tp", "2").output.startswith("model ")
    assert rows("gpt-oss-20b", "--csv", str(tmp_path / "one.csv"))[0]["model"] == "gpt-oss-20b"


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_plot(tmp_path: pathlib.Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    line = (*MODELS[:2], "whisper-large-v3", "--tp", "1,2", "--max-model-len", "8192,32768")
    assert run(*line, "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(start)
    if name.endswith("svg"):
        text = path.read_text()
        assert MODELS[0] in text
        assert "whisper-large-v3" not in text, "what was refused is not drawn"


def test_two_engines_in_one_table() -> None:
    """Rows of both, each what its plan alone says; an option that one of them lacks is refused."""
    found = rows("llama-3.1-8b", "qwen3-next-80b-a3b", "--dialect", "vllm-0.33,rtp-llm", "--max-model-len", "32000")
    assert [row["dialect"] for row in found] == ["vllm-0.33", "rtp-llm"] * 2
    for row in found:
        result = run(row["model"], "--dialect", row["dialect"], "--max-model-len", "32000", "--json", "-")
        report = json.loads(result.output)
        assert report["num_blocks"] == row["num_blocks"]
        if row["dialect"] == "rtp-llm":
            assert (report["requests"], report["concurrency"]) == (row["requests"], row["concurrency"])
    assert [row["token_bytes"] for row in found[:2]] == [131072] * 2
    twice = ("--dialect", "vllm-0.33", "--dialect", "rtp-llm")
    lines = run("llama-3.1-8b", *twice, "--max-model-len", "32000").output.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["llama-3.1-8b", "vllm-0.33", "rtp-llm"]
    with pytest.raises(ConfigError, match="--gpu-memory is not for --dialect rtp-llm"):
        run("llama-3.1-8b", "--dialect", "vllm-0.33,rtp-llm", "--gpu-memory", "80GiB")


def test_every_combination_of_options_has_a_row() -> None:
    asked = ("--tp", "1,2,4,8", "--kv-cache-dtype", "auto,fp8", "--max-model-len", "8192,32768,131072")
    assert len(rows(*MODELS, *asked)) == 96
