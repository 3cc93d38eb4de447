"""Records vLLM 0.33's choice of attention kernels, as the table in which `hkv plan` looks it up.

vLLM's own selector (`CudaPlatformBase.get_valid_backends`) is asked for each compute capability, value of
`--kv-cache-dtype` and sort of layer; of each kernel, which blocks it takes, in which orders of memory, and whether its
implementation refuses what the selector took. Nothing but a driver is simulated (`judges/simulated_gpu.py`). Run it
with the Python of an environment that has vLLM, which `benchmarks/make_vllm_environment.py` makes.

Example:
  build/vllm/bin/python benchmarks/record_attention_backends.py hkv/dialects/vllm/planning/backends.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.compare_cache_types import CacheTypes, forget
from benchmarks.judges import simulated_gpu
from benchmarks.judges.records import lines_of
from benchmarks.judges.vllm_classes import silence
from hkv.dialects.vllm.planning.engine_options import DEVICES, Device

HEAD_SIZES = (*range(8, 584, 8), 100)
"""Elements of a head; the last stands for all that are not listed."""

LATENTS: dict[str, tuple[int, ...]] = {
    "sparse": (0, 1),
    "rank": (512, 256, 0),
    "rope": (64, 0, 32),
    "nope": (128, 64, 192, 256, 0),
    "queries": (128, 8, 16, 32, 64, 0),
    "topk": (2048, 128, 0),
    "dcp": (0, 1),
}
"""Sizes of a layer of latents that some kernel asks for; the last stands for all that are not listed."""

OTHERS = {"rank": 400, "nope": 96, "queries": 24, "topk": 100}
"""Sizes asked about in place of the zeros."""

RECORDED = ("a100", "l40s", "h100", "b200", "rtx5090")
"""A device of each compute capability that vLLM tells apart; 8.6, 10.3 and 12.1 are taken for 8.0, 10.0 and 12.0."""

LETTERS = "".join(chr(code) for code in range(35, 0x250) if chr(code).isprintable() and chr(code) not in "\\")


class Selector:
    """vLLM's selector on a simulated GPU."""

    def __init__(self) -> None:
        self.judge = CacheTypes()
        load = importlib.import_module
        self.torch, self.config = self.judge.classes.torch, self.judge.classes.config
        self.ask = load("vllm.v1.attention.selector").AttentionSelectorConfig
        self.capability = load("vllm.platforms.interface").DeviceCapability
        self.vllm_config = self.config.VllmConfig()
        self.kernels: dict[str, int] = {}
        self.refusals: dict[tuple[Any, ...], bool] = {}
        self.layouts: dict[str, dict[str, list[str]]] = {}
        simulated_gpu.set_groups(1)

    def be(self, device: Device) -> None:
        self.device = device
        self.judge.classes.be(device)
        self.refusals.clear()
        forget()

    @contextlib.contextmanager
    def model(self, dtype: str, head_size: int, heads: tuple[int, int], dcp: int, images: bool, **fields: Any) -> Any:
        """A model of these sizes is being built."""
        config = self.vllm_config
        config.__dict__["model_config"] = types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(**fields),
            get_head_size=lambda: head_size,
            get_num_attention_heads=lambda parallel: heads[0],
            get_num_kv_heads=lambda parallel: heads[1],
            is_mm_prefix_lm=images,
            is_diffusion=False,
            rswa_window=None,
            dtype=self.torch.bfloat16,
            max_model_len=4096,
        )
        config.parallel_config.__dict__["decode_context_parallel_size"] = 1 + dcp
        config.cache_config.__dict__["cache_dtype"] = dtype
        with self.config.set_current_vllm_config(config):
            yield

    def valid(self, queries: int, **asked: Any) -> tuple[int, ...]:
        """The kernels that take a layer, best first."""
        config = self.ask(dtype=self.torch.bfloat16, block_size=None, **asked)
        platform: Any = type(self.judge.classes.platform)
        found, _ = platform.get_valid_backends(self.capability(*self.device.capability), config, queries)
        return tuple(self._kernel(each.backend.name, each.backend_class, config) for each in found)

    def _kernel(self, name: str, kernel: Any, asked: Any) -> int:
        """Number of a kernel with its blocks: `16m` for multiples, and `!` for one whose implementation refuses."""
        layouts = kernel.supported_kv_cache_layouts()
        if layouts is not None:
            self.layouts.setdefault(_name(self.device), {})[name] = [layout.name for layout in layouts]
        sizes = kernel.get_supported_kernel_block_sizes()
        blocks = ",".join(str(size) if isinstance(size, int) else f"{size.base}m" for size in sizes)
        said = f"{name} {blocks}{'!' if self._refuses(kernel, asked) else ''}"
        return self.kernels.setdefault(said, len(self.kernels))

    def _refuses(self, kernel: Any, asked: Any) -> bool:
        key = (kernel, asked.kv_cache_dtype, asked.use_dcp, asked.head_size == 64)
        if key not in self.refusals:
            self.refusals[key] = self._raises(kernel, asked)
        return self.refusals[key]

    def _raises(self, kernel: Any, asked: Any) -> bool:
        """True if the implementation names the cache's type as what it cannot do."""
        size = asked.head_size
        options: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None}
        if asked.use_sparse:
            return False  # none of them looks at the type beyond what the selector does
        if asked.use_mla:
            names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim")
            sizes = dict(zip(names, (None, 512, 128, 64, 192, 128), strict=True))
            options |= {**sizes, "kv_b_proj": None}
        try:
            kernel.get_impl_cls()(
                num_heads=8,
                head_size=size,
                scale=1.0,
                num_kv_heads=1 if asked.use_mla else 8,
                kv_cache_dtype=asked.kv_cache_dtype,
                attn_type=asked.attn_type,
                kv_sharing_target_layer_name=None,
                **options,
            )
        except (ValueError, NotImplementedError) as error:
            return any(word in str(error) for word in ("FP8", "NVFP4", "KV cache"))
        return False

    def heads(self, dtype: str, flags: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """For each of `HEAD_SIZES` the kernels that take it."""
        found = []
        queries, dcp = (8, 1 if "grouped" in flags else 8), int("dcp" in flags)
        for size in HEAD_SIZES:
            with self.model(dtype, size, queries, dcp, "images" in flags):
                asked = {
                    "head_size": size,
                    "kv_cache_dtype": dtype,
                    "has_sink": "sink" in flags,
                    "use_mm_prefix": "images" in flags,
                    "attn_type": "encoder_decoder" if "cross" in flags else "decoder",
                    "has_sliding_window": "window" in flags,
                    "use_dcp": bool(dcp),
                }
                found.append(self.valid(8, **asked))
        return tuple(found)

    def latent(self, dtype: str, case: Mapping[str, int]) -> tuple[int, ...]:
        """The kernels that take a layer of latents."""
        sizes = {name: value or OTHERS.get(name, 0) for name, value in case.items()}
        fields = {"kv_lora_rank": sizes["rank"], "qk_rope_head_dim": sizes["rope"], "qk_nope_head_dim": sizes["nope"]}
        if case["sparse"]:
            fields["index_topk"] = sizes["topk"]
        size = sizes["rank"] + sizes["rope"]
        with self.model(dtype, size, (sizes["queries"], 1), case["dcp"], False, v_head_dim=128, **fields):
            asked = {"head_size": size, "kv_cache_dtype": dtype, "use_mla": True, "use_sparse": bool(case["sparse"])}
            return self.valid(sizes["queries"], **asked, use_dcp=bool(case["dcp"]))


def _name(device: Device) -> str:
    return ".".join(map(str, device.capability))


def flag_sets() -> Iterator[tuple[str, ...]]:
    """Combinations that occur: images and sinks never meet, and an encoder's output has nothing else."""
    for first in ((), ("sink",), ("images",)):
        for count in range(4):
            for rest in itertools.combinations(("window", "dcp", "grouped"), count):
                yield (*first, *rest)
    yield ("cross",)
    yield ("grouped", "cross")


class Table:
    """Answers, each distinct one once, under a letter."""

    def __init__(self) -> None:
        self.found: dict[Any, str] = {}

    def letter(self, answer: Any) -> str:
        return self.found.setdefault(answer, LETTERS[len(self.found)])


def latent_rows(answers: dict[tuple[int, ...], str]) -> dict[str, Any]:
    """Answers by sizes, without the sizes on which none of them depends."""
    names = list(LATENTS)
    for name in list(names):
        at = names.index(name)
        merged: dict[tuple[int, ...], str] = {}
        if all(merged.setdefault((*key[:at], *key[at + 1 :]), said) == said for key, said in answers.items()):
            names.remove(name)
            answers = merged
    return {"sizes": names, "rows": {" ".join(map(str, key)): said for key, said in answers.items()}}


def record(selector: Selector) -> dict[str, Any]:
    """The whole table."""
    dtypes, choices, runs = selector.judge.types, Table(), Table()
    heads: dict[str, dict[str, str]] = {}
    latents: dict[str, dict[str, Any]] = {}
    for device in (DEVICES[name] for name in RECORDED):
        selector.be(device)
        rows = heads.setdefault(_name(device), {})
        for flags in flag_sets():
            each = (tuple(map(choices.letter, selector.heads(dtype, flags))) for dtype in dtypes)
            rows[" ".join(flags)] = "".join(runs.letter(_runs(said)) for said in each)
        for sparse in LATENTS["sparse"]:
            found = {}
            for key in itertools.product(*LATENTS.values()):
                case = dict(zip(LATENTS, key, strict=True))
                if case["sparse"] == sparse and (sparse or (case["queries"], case["topk"]) == (128, 2048)):
                    found[key] = "".join(choices.letter(selector.latent(dtype, case)) for dtype in dtypes)
            latents.setdefault(_name(device), {})["sparse" if sparse else "dense"] = latent_rows(found)
        print(device.name, len(choices.found), len(runs.found), file=sys.stderr, flush=True)
    return {
        "vllm": "0.33.0",
        "types": dtypes,
        "head_sizes": HEAD_SIZES,
        "kernels": list(selector.kernels),
        "choices": {letter: choice for choice, letter in choices.found.items()},
        "runs": {letter: run for run, letter in runs.found.items()},
        "heads": heads,
        "latents": latents,
        "layouts": selector.layouts,
        **layers_own(list(selector.kernels), dtypes),
    }


def layers_own(kernels: Sequence[str], dtypes: Sequence[str]) -> dict[str, Any]:
    """Types that latent layers store in place of those asked for, by kernel, and blocks of an indexer."""
    layer = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerBackend
    stored: dict[str, dict[str, str]] = {}
    for name in sorted({kernel.split(" ")[0] for kernel in kernels if "MLA" in kernel}):
        kernel = types.SimpleNamespace(get_name=lambda name=name: name)
        found = {dtype: layer._canonicalize_sparse_mla_kv_cache_dtype(kernel, dtype) for dtype in dtypes}
        if changed := {dtype: said for dtype, said in found.items() if said != dtype}:
            stored[name] = changed
    return {"stored": stored, "indexer": indexer.get_supported_kernel_block_sizes()}


def _runs(letters: Sequence[str]) -> str:
    """Letters of head sizes one after another, each run once with its length: `a3b70`."""
    return "".join(f"{letter}{len(list(group))} " for letter, group in itertools.groupby(letters)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()
    silence()
    table = record(Selector())
    arguments.output.write_text(lines_of(table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
