"""The engine in C is built, and agrees with the reference wherever it says that it implements a configuration."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from hkv.cli.check import command as check
from hkv.cli.diff import command as diff
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.oracle.log_file import write_log
from hkv.oracle.record import Only, record

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent / "examples" / "c_engine"
ONE_FULL = ["--kinds", "full_attention", "--max-groups", "1"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the engine in C with")
    program = tmp_path_factory.mktemp("c") / "engine"
    sources = [str(FOLDER / name) for name in ("engine.c", "pool.c", "keys.c", "json.c")]
    subprocess.run(
        [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), *sources], check=True
    )
    return f"cmd:{program}"


@pytest.mark.parametrize("feature", ["core", "external"])
def test_it_agrees_with_the_reference(engine: str, feature: str) -> None:
    arguments = ["--engines", f"numpy,{engine}", "--seeds", "40", "--feature", feature, "--version", "1", *ONE_FULL]
    done = CliRunner().invoke(diff, arguments)
    assert done.exit_code == 0, done.output
    assert "no difference" in done.output
    assert "not implemented" not in done.output


def test_recorded_logs(engine: str, tmp_path: pathlib.Path) -> None:
    for seed in range(5):
        recording = record(NumpyEngine, "core", seed, 1, 16, Only(frozenset({"full_attention"}), 1))
        write_log(tmp_path / f"{seed}.jsonl", recording.header, recording.operations, recording.answers)
    done = CliRunner().invoke(check, [str(tmp_path), "--engine", engine])
    assert done.exit_code == 0, done.output
    assert "5 of 5 logs agree" in done.output


def test_it_says_what_it_does_not_implement(engine: str) -> None:
    done = CliRunner().invoke(diff, ["--engines", f"{engine},numpy", "--seeds", "6", "--feature", "core", *ONE_FULL])
    assert done.exit_code == 0, done.output
    assert "4 of them not implemented (only version 1 of the log format)" in done.output
    done = CliRunner().invoke(diff, ["--engines", f"{engine},numpy", "--seeds", "2", "--feature", "eagle"])
    assert done.exit_code == 1
    assert "one configuration at least that both engines implement" in str(done.exception)


def test_bad_input_is_answered(engine: str) -> None:
    header = '{"oplog":1,"dialect":"vllm-0.33","groups":[{"kind":"full_attention","block_size":2}],"num_blocks":4,'
    header += '"hash":"sha256_cbor","hash_block_size":2,"max_model_len":64}'
    request = '{"op":"request","id":"r1","tokens":[1]}'
    text = f'{header}\nnonsense\n{{"op":"jump"}}\n{{"op":"free","id":"r1"}}\n{{"op":"reset"}}\n'
    text += f"{request}\n{request}\n{header}\n{request}\n"
    done = subprocess.run([engine.removeprefix("cmd:")], input=text, capture_output=True, text=True, check=True)
    answers = done.stdout.splitlines()
    assert answers[0] == '{"again":true}'
    assert all(answer.startswith('{"error":') for answer in answers[1:4])
    assert answers[4] == '{"ok":true}'
    assert answers[5] == "null"
    assert answers[6].startswith('{"error":')
    assert answers[7:] == ['{"again":true}', "null"]  # another header: nothing is left of what came before it
