"""The scripts of the three sorts of users run."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

import hkv
from hkv._lazy import loader
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from tests.scripts import load_script

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
RTP_LLM = ROOT / "docs" / "dialects.md"


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


def test_a_cache_of_rtp_llm(monkeypatch, capsys) -> None:
    """Latents, which all ranks hold alike, were counted twice; what differs ends the command with 1."""
    example, model = load_script(EXAMPLES / "rtp_llm_cache.py"), str(ROOT / "tests" / "data" / "models" / "{}.json")
    assert example.main([model.format("deepseek_v3")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "default: (24, 64, 576) of bfloat16, parts latent, rope",
        "equal    pages written by parts: 7,077,888 bytes of 2 ranks",
        "equal    blocks copied for a fork: 7,077,888 bytes of 2 ranks",
        "equal    pages moved to decode: 3,538,944 bytes of 1 rank, 6 moves",
        "equal    slots for every token: 160 tokens",
    ]
    carry = example.carry
    monkeypatch.setattr(example, "carry", lambda moves, *pools: carry(moves[:1], *pools))
    assert example.main([model.format("deepseek_v3")]) == 1
    assert "DIFFERS  pages moved to decode" in capsys.readouterr().out
    assert example.main([model.format("jamba")]) == 2
    assert capsys.readouterr().err.startswith("refused: states = ")
    assert example.main([model.format("gemma3_text"), "--pools", "shared"]) == 2


def test_the_table_of_rtp_llms_caches_is_what_models_are_served_with() -> None:
    """`tests/slow/examples/test_long_examples.py` runs its rows."""
    example, folder = load_script(EXAMPLES / "rtp_llm_cache.py"), ROOT / "tests" / "data" / "models"
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| ([\w, ]+) \|$", RTP_LLM.read_text(), re.MULTILINE)
    for name, pools, tokens, groups in rows:
        model, options = example.described(str(folder / f"{name}.json"), None)
        cache = PlannedCache.of_layers(model, options, num_blocks=example.ROOM)
        sizes = {group.block.seq_size for group in cache.plan.groups}
        assert (options.pools, str(min(sizes)), groups) == (pools, tokens, ", ".join(g.tag for g in cache.plan.groups))
    refused = re.findall(r"`(\w+)`", re.findall(r"No size: (.*?\.)\n", RTP_LLM.read_text(), re.DOTALL)[0])
    for name in refused:
        with pytest.raises(hkv.HKVError):
            PlannedCache.of_layers(*example.described(str(folder / f"{name}.json"), None), num_blocks=9)
    assert sorted([name for name, *_ in rows] + refused) == sorted(path.stem for path in folder.glob("*.json"))


def test_a_suite_of_property_tests(tmp_path: pathlib.Path) -> None:
    plugin = ("-p", "hkv.testing.plugin", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-c", "/dev/null")
    shown = run("-m", "pytest", "-q", *plugin, EXAMPLES / "test_an_engine.py", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "4 passed" in shown


def test_the_page_lists_the_face() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert {name for name in hkv.__all__ if f"`{name}`" not in page} == {"testing"}
    generated = (ROOT / "docs" / "api.md").read_text()
    assert {name for name in hkv.__all__ if f"::: hkv.{name}\n" not in generated} == {"testing"}


def test_a_name_that_is_to_go_warns_and_works() -> None:
    load = loader("hkv", {"hkv.errors": "HKVError"}, {"Error": ("HKVError", "0.3")})
    with pytest.warns(DeprecationWarning, match=r"hkv\.Error is deprecated since 0\.3: use hkv\.HKVError"):
        assert load("Error") is hkv.HKVError
