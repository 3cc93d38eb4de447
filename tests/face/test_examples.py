"""The scripts of the three sorts of users run."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import hkv

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"


def run(*arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_oracle_of_an_engine() -> None:
    lines = run(EXAMPLES / "oracle_of_an_engine.py").splitlines()
    assert lines[0].endswith("agrees: True")
    assert lines[1] == "WrongEngine: 7 operations, breaks the invariant index"
    assert lines[2].startswith("line 8: ")


def test_a_serving_experiment() -> None:
    lines = run(
        EXAMPLES / "serving_experiment.py", ROOT / "tests" / "data" / "models" / "gemma3_text.json"
    ).splitlines()
    assert lines[1:] == [
        "longest hit of the same prompt: 32 tokens",
        "request 1 found 32, request 0 0",
        "computed [48, 48] tokens",
        "wrote 40 tokens, read back 40",
        "55 blocks free",
    ]


def test_a_cache_of_rtp_llm() -> None:
    script = EXAMPLES / "rtp_llm_cache.py"
    assert len(script.read_text().splitlines()) <= 80
    lines = run(script, ROOT / "tests" / "data" / "models" / "qwen3_next.json").splitlines()
    assert lines[0] == "full: 2 layers, (10, 2, 1, 1024, 256) of bfloat16, parts ['key', 'value']"
    assert lines[-2] == "the fork {'full': [1, 2, 7], 'linear0': [4, 5, 8]} has the same pages: True"
    assert lines[-1] == "144 moves to one rank, all there: True"


def test_a_suite_of_property_tests(tmp_path: pathlib.Path) -> None:
    plugin = ("-p", "hkv.testing.plugin", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", "/dev/null")
    shown = run("-m", "pytest", "-q", *plugin, EXAMPLES / "test_an_engine.py", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "4 passed" in shown


def test_the_page_lists_the_face_and_its_code_runs() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    assert {name for name in hkv.__all__ if f"`{name}`" not in page} == {"testing"}
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
