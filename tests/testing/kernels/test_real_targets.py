"""Kernels of vLLM, SGLang, transformers and LMCache held to the definition; examples/kernels calls them."""

from __future__ import annotations

import pathlib

import pytest

from hkv.testing.kernels import check, target_of

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
    verdict = judged(f"vllm_writers.py:reshape_and_cache_{name}")
    assert verdict.failure is None
    assert {"padding tokens", "padded pages", "strided inputs", "split blocks"} <= set(verdict.features)


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


@pytest.mark.parametrize("name", ["torch_writer.py", "c_writer.c"])
def test_the_page_shows_the_examples_as_they_are(name: str) -> None:
    code = (EXAMPLES / name).read_text()
    code = code[code.index("import torch\n") :] if name.endswith(".py") else code
    assert code.strip() in PAGE.read_text()
