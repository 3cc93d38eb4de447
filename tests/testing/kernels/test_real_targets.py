"""Kernels of engines, of JAX and of HKV held to the definition; examples/kernels calls them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from hkv.testing.kernels import check, repeat, target_of
from hkv.testing.kernels.cases import Case

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples" / "kernels"
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "check-kernel.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch, Triton and the engines say


def judged(name: str, draws: int = 40):
    return check(target_of(f"{EXAMPLES}/{name}"), draws)


@pytest.mark.vllm
@pytest.mark.torch
@pytest.mark.triton
@pytest.mark.parametrize("name", ["flash", "flash_diffkv", "per_token_head"])
def test_writers_of_vllm(name: str) -> None:
    """In a process of its own: whether there is Triton, vLLM decides once, and elsewhere finds no driver for it."""
    target = f"{EXAMPLES}/vllm_writers.py:reshape_and_cache_{name}"
    command = [sys.executable, "-W", "ignore", "-m", "hkv", "check-kernel", target, "--draws", "40", "--json", "-"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert told.returncode == 0, told
    asked = json.loads(told.stdout)["asked"]["feature"]
    assert {"padding tokens", "padded pages", "strided inputs", "split blocks"} <= set(asked)


@pytest.mark.vllm
@pytest.mark.torch
@pytest.mark.parametrize("name", ["static_layer", "paged_cache", "paged_cache_read"])
def test_caches_of_transformers(name: str) -> None:
    verdict = judged(f"transformers_caches.py:{name}")
    assert verdict.failure is None
    assert {"offset", "split blocks", "two sizes"} <= set(verdict.features)


@pytest.mark.sglang
@pytest.mark.torch
@pytest.mark.parametrize("name", ["set_kv_buffer", "set_kv_buffer_by_head", "set_mla_kv_buffer_naive", "move_kv_cache"])
def test_pools_of_sglang(name: str) -> None:
    verdict = judged(f"sglang_pools.py:{name}")
    assert verdict.failure is None
    assert {"offset", "split blocks"} <= set(verdict.features)


@pytest.mark.lmcache
@pytest.mark.torch
@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_transfers_of_lmcache(name: str) -> None:
    verdict = judged(f"lmcache_transfer.py:{name}")
    assert verdict.failure is None
    assert {"offset", "skip"} <= set(verdict.features)


@pytest.mark.parametrize("operation", ["write", "gather", "scatter", "copy_blocks", "zero"])
def test_kernels_of_hkv(operation: str) -> None:
    verdict = judged(f"hkv_implementations.py:pallas_triton.{operation}", draws=20)
    assert verdict.failure is None
    assert verdict.features["missing ids"] > 0


@pytest.mark.parametrize("name", ["ref_ragged_paged_attention", "paged_attention"])
def test_attention_of_jax(name: str) -> None:
    assert judged(f"jax_attention.py:{name}", draws=20).failure is None


def test_jax_s_kernel_for_gpus_multiplies_what_is_behind_the_end() -> None:
    target = target_of(f"{EXAMPLES}/jax_attention.py:paged_attention", lacks=("window", "two sizes"))
    sizes: dict[str, Any] = {"block_size": 3, "heads": 1, "key_size": 8, "value_size": 8, "blocks": 2}
    case = Case(operation="attention", dtype="float32", tables=((1,),), queries=(1,), lengths=(2,), **sizes)
    failure = repeat(target, case).failure
    assert failure is not None
    assert failure.kind == "slots that hold nothing for the query are read (NaN)"
    assert repeat(target, msgspec.structs.replace(case, poison=False)).failure is None


@pytest.mark.tokamax
@pytest.mark.parametrize("name", ["write", "attention"])
def test_tokamax(name: str) -> None:
    assert judged(f"tokamax_writer.py:{name}").failure is None


@pytest.mark.parametrize("name", ["torch_writer.py", "c_writer.c"])
def test_the_page_shows_the_examples_as_they_are(name: str) -> None:
    code = (EXAMPLES / name).read_text()
    code = code[code.index("import torch\n") :] if name.endswith(".py") else code
    assert code.strip() in PAGE.read_text()
