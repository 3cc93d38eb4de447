"""Plans that vLLM does not start with: fewer blocks of recurrent states than requests of a decode step."""

from __future__ import annotations

import re
import types

import pytest

from hkv.dialects.vllm.planning.engine_options import DEVICES, EngineOptions
from hkv.dialects.vllm.planning.engine_plan import plan
from hkv.model.huggingface import load_config, read_model
from hkv.model.released import released_models
from tests.cli.commands import run


@pytest.mark.parametrize("rows", [(), ("gpt-oss-20b",)])
def test_a_plan_says_with_which_option_it_would_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: tuple[str, ...]
) -> None:
    command = ("plan", "qwen3.6-27b", *rows, "--gpu", "rtx-pro-6000")
    _, out, _ = run(monkeypatch, capsys, *command)
    said = " ".join(out.split())
    assert said.count("does not start with CUDA graphs: max_num_seqs (1024) exceeds the 612 to 674 blocks") == 1
    (option,) = re.findall(r"(--max-num-seqs \d+) starts", said)
    _, out, _ = run(monkeypatch, capsys, *command, *option.split())
    assert "start with CUDA graphs" not in " ".join(out.split())


def with_states() -> list[str]:
    """Released models that have layers of recurrent states."""
    configs = {each.name: read_model(load_config(each.name)) for each in released_models()}
    return [name for name, model in configs.items() if any(spec.snapshot for spec in model.specs.values())]


def test_no_default_plan_asks_for_more_states_than_there_are_without_saying_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every released model with states, each on every sixth kind of GPU, read from what `hkv plan` prints.

    On all kinds of GPUs 185 of 552 are plans, of which 27 ask for more and say so, 20 of them for all of the estimated
    memory; the others are refused for want of memory, of known weights or of a report of the GPU's memory.
    """
    gpus, planned, told = [device.name for device in DEVICES.values() if device.reported], 0, 0
    for place, model in enumerate(with_states()):
        for gpu in gpus[place % 6 :: 6]:
            code, out, err = run(monkeypatch, capsys, "plan", model, "--gpu", gpu)
            if code:
                assert len(err.splitlines()) == 1
                continue
            said = " ".join(out.split())
            (requests,), (blocks,) = (
                re.findall(r"--max-num-seqs (\d+) \(", said),
                re.findall(r" blocks ([\d,]+), one", said),
            )
            more, planned = int(requests) > int(blocks.replace(",", "")), planned + 1
            assert more == ("start with CUDA graphs: max_num_seqs" in said), (model, gpu)
            told += more
    assert planned > 20
    assert told >= 3


def started(model: dict[str, object] | str, requests: int, blocks: int) -> str:
    options = EngineOptions(max_num_seqs=requests, max_model_len=4_096, num_gpu_blocks_override=blocks)
    return plan(model, "80GiB", options=options).not_started


def test_only_blocks_of_recurrent_states_are_asked_for() -> None:
    assert started("gpt-oss-20b", 4_001, 4_000) == ""
    assert started("qwen3.6-27b", 612, 612) == ""
    assert "(613) exceeds the 612 blocks" in started("qwen3.6-27b", 613, 612)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requests", [400, 401, 1_024])
@pytest.mark.parametrize("model", ["qwen3.6-27b", "gpt-oss-20b"])
def test_vllm_refuses_the_same(model: str, requests: int) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    caches = types.SimpleNamespace(num_blocks=400, has_mamba_layers=model == "qwen3.6-27b")
    refused = ""
    config = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    try:
        config.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.UNIFORM_BATCH,
            "A",
            kv_cache_config=caches,  # type: ignore[arg-type]
            max_num_reqs=requests,
        )
    except ValueError as error:
        refused = str(error)
    told = started(model, requests, 400) if model == "qwen3.6-27b" else ""
    assert bool(told) == bool(refused)
    assert f"max_num_seqs ({requests}) exceeds" in refused or not told
