"""Options of `vllm serve` that the cache depends on, under vLLM 0.33's names: fields, and the command line's, in one.

A field that `option` makes is an option of `hkv plan` too, with the same default, documented by its help; the
others are options that all dialects have (`hkv.cli.plan`), or asked for in another form. None is left to the engine.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import re
import tomllib

import click

from hkv.contract.options import Number, option
from hkv.contract.plan_command import length_option
from hkv.dialects.vllm.planning.speculation import Speculation
from hkv.errors import ConfigError, PlanError
from hkv.layout.orders import Order
from hkv.limits import MAX_BLOCKS, MAX_MEMORY, MAX_RANKS, MAX_TOKENS, check_whole


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of GPU; devices.toml documents the fields."""

    name: str
    driver_name: str
    memory_gib: int
    capability: tuple[int, int]
    reported: float
    source: str = ""
    also: str = ""


def _devices() -> dict[str, Device]:
    text = importlib.resources.files("hkv.dialects.vllm.planning").joinpath("devices.toml").read_text("utf-8")
    found = {name: {**row, "capability": tuple(row["capability"])} for name, row in tomllib.loads(text).items()}
    return {name: Device(name, **row) for name, row in found.items()}


DEVICES = _devices()

DEFAULT_DEVICE = "h100"
"""Device that is assumed where none is named."""


def device_of(name: str) -> Device:
    """The device of that name, as people or its driver write it: in any case, with hyphens, spaces or neither."""
    asked = _plain(name).removeprefix("nvidia").removeprefix("geforce")
    for device in DEVICES.values():
        driver = _plain(device.driver_name).removeprefix("nvidia").removeprefix("geforce")
        if asked in (driver, *map(_plain, (device.name, *device.also.split()))):
            return device
    raise ConfigError("device", name, f"one of {', '.join(sorted(DEVICES))}")


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def reported_memory(name: str) -> int:
    """Bytes that such devices report as their memory."""
    return int(device_of(name).reported * 1024) << 20


USAGE_CONTEXTS = ("OPENAI_API_SERVER", "LLM_CLASS", "OPENAI_BATCH_RUNNER")
"""Makers of an engine (vLLM 0.33 `UsageContext`): `vllm serve`, `LLM(...)`, `vllm run-batch`."""

PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")
"""Aims that vLLM 0.33 can be tuned for; `throughput` doubles tokens and requests of a step."""

ALL2ALL_BACKENDS = (
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "flashinfer_nvlink_one_sided",
    "flashinfer_nvlink_two_sided",
    "moonep",
    "mori_high_throughput",
    "mori_low_latency",
    "nixl_ep",
)
"""Ways of tokens to the ranks of their experts (vLLM 0.33 `All2AllBackend`)."""

GDN_BACKENDS = ("flashinfer", "triton", "cutedsl")
KDA_BACKENDS = ("auto", "flashkda", "triton")
"""Kernels for prompts of recurrent layers that vLLM 0.33 has on NVIDIA's GPUs; which of them leave a state behind
inside a chunk, `hkv.model.huggingface.model` says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `vllm serve`, with its own defaults.

    Attributes:
      gpu_memory, weights, activations: bytes on each GPU; None for what such a device reports, computed or estimated.
      gpu_memory_reported: `gpu_memory` is what such a device reports as a rule, not what this one does.
      kv_cache_memory_bytes: bytes for the cache on each GPU; None to compute them from those three.
      max_model_len: tokens of the longest request; None for the model's, -1 for the longest that fits.
      speculation: drafting of tokens, or None.
      decode_context_parallel_size: of the tensor-parallel ranks, how many split a sequence's tokens.
      block_size: tokens per block, or None for what the kernels want.
      kernel_block_size: tokens of a kernel block, of which attention blocks are multiples next to states; 0 for 16.
      dtype, kv_cache_dtype, state_dtype: element types of the model, of the cache (or its packing) and of states.
      ignore_fields, strict: of the config, as in `ReadOptions`. vLLM has no such options, nor any for kernel blocks or
        tokens in flight.
    """

    device: str = option(
        DEFAULT_DEVICE,
        "--gpu",
        "--device",
        metavar="NAME",
        show_default=False,
        help="GPU: its memory, and vLLM's defaults on it. Left out, --memory says the memory, and defaults are those "
        f"on an {DEFAULT_DEVICE}. One of {', '.join(DEVICES)}.",
    )
    gpu_memory: int | None = option(
        metavar="SIZE", help="Memory that each GPU reports; left out, what those of --gpu do."
    )
    gpu_memory_utilization: float = option(
        0.92, type=Number(0, 1, min_open=True), help="Share of --gpu-memory that vLLM takes."
    )
    weights: int | None = option(
        metavar="SIZE|INDEX",
        help="Weights on each GPU, or model.safetensors.index.json, dealt out evenly; left out, vLLM's classes'.",
    )
    activations: int | None = option(
        metavar="SIZE",
        help="What profiling finds beside the weights: activations, CUDA graphs, the rest; left out, an estimate.",
    )
    num_gpu_blocks_override: int | None = option(
        type=click.IntRange(1, MAX_BLOCKS), help="Blocks, whatever the memory."
    )
    max_model_len: int | None = length_option()
    max_num_batched_tokens: int | None = option(
        type=click.IntRange(1, MAX_TOKENS),
        help="Tokens of one step; left out, vLLM's default for --device and --usage-context.",
    )
    max_num_seqs: int | None = option(type=click.IntRange(1, MAX_TOKENS), help="Requests of one step.")
    async_scheduling: bool | None = option(
        None,
        "--async-scheduling/--no-async-scheduling",
        help="Schedule a step while one runs, so that windows and chunks keep the tokens of two; vLLM's default.",
    )
    enable_chunked_prefill: bool | None = option(
        None,
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Compute prompts in several steps; vLLM's default.",
    )
    performance_mode: str = option(PERFORMANCE_MODES[0], type=click.Choice(PERFORMANCE_MODES))
    usage_context: str = option(
        USAGE_CONTEXTS[0],
        type=click.Choice(USAGE_CONTEXTS, case_sensitive=False),
        help="Who makes the engine: `vllm serve`, `LLM(...)` or `vllm run-batch`.",
    )
    max_in_flight_tokens: int | None = option(
        None,
        "max_in_flight",
        "--max-in-flight",
        type=click.IntRange(1, MAX_TOKENS),
        help="Tokens scheduled and not settled; left out, those of all steps that run at once.",
    )
    speculation: Speculation | None = option(
        None,
        "speculative_config",
        "--speculative-config",
        metavar="JSON",
        help='How tokens are drafted, such as \'{"method": "mtp", "num_speculative_tokens": 1}\'.',
    )
    kv_cache_layout: str | None = option(
        None,
        "layout",
        "--layout",
        metavar="ORDER",
        help="LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC; left out, the first fit.",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        " /--disable-prefix-caching",
        " /--no-prefix-caching",
        help="Keep recurrent states at boundaries, or one a request; vLLM's default: where the model can.",
    )
    disable_hybrid_kv_cache_manager: bool | None = option(
        None,
        "--no-hybrid/--no-disable-hybrid-kv-cache-manager",
        "--disable-hybrid-kv-cache-manager/--enable-hybrid-kv-cache-manager",
        help="Cache every layer like full attention; vLLM's default with chunked attention.",
    )
    gdn_prefill_backend: str | None = option(
        type=click.Choice(GDN_BACKENDS),
        help="Kernel for prompts of gated delta nets; FlashInfer's, if the GPU has it, keeps a state in a chunk.",
    )
    kda_prefill_backend: str = option(
        KDA_BACKENDS[0],
        type=click.Choice(KDA_BACKENDS),
        help="Kernel for prompts of Kimi K3's layers; FlashKDA keeps a state in a chunk.",
    )
    prefix_match_unit: int | None = option(
        type=click.IntRange(1, MAX_TOKENS), help="Tokens between two hashes of a prefix."
    )
    data_parallel_size: int = option(
        1,
        "--dp",
        "--data-parallel-size",
        "-dp",
        type=click.IntRange(1, MAX_RANKS),
        help="Engines with a cache each; the plan is for one.",
    )
    enable_expert_parallel: bool = option(
        False,
        "--ep/--no-ep",
        "--enable-expert-parallel",
        "-ep",
        help="Deal experts out to ranks; with --dp it may lower the tokens of a step.",
    )
    all2all_backend: str = option(ALL2ALL_BACKENDS[0], type=click.Choice(ALL2ALL_BACKENDS))
    gpu_memory_reported: bool = False
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    block_size: int | None = None
    kernel_block_size: int = 0
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    state_dtype: str | None = None
    ignore_fields: tuple[str, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        device_of(self.device)
        for name, known in (
            ("usage_context", USAGE_CONTEXTS),
            ("performance_mode", PERFORMANCE_MODES),
            ("all2all_backend", ALL2ALL_BACKENDS),
            ("gdn_prefill_backend", (None, *GDN_BACKENDS)),
            ("kda_prefill_backend", KDA_BACKENDS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"one of {', '.join(filter(None, known))}")
        if not 0 < self.gpu_memory_utilization <= 1:  # NaN is neither
            raise PlanError("gpu_memory_utilization", self.gpu_memory_utilization, "a share, more than 0 and at most 1")
        self._check(0, MAX_MEMORY, "kv_cache_memory_bytes", "gpu_memory", "weights", "activations")
        self._check(1, MAX_BLOCKS, "num_gpu_blocks_override")
        self._check(
            1, MAX_RANKS, *(f"{name}_parallel_size" for name in ("tensor", "pipeline", "data", "decode_context"))
        )
        if self.max_model_len != -1:
            self._check(1, MAX_TOKENS, "max_model_len")
        self._check(1, MAX_TOKENS, "max_num_batched_tokens", "max_num_seqs", "block_size", "prefix_match_unit")
        self._check(1, MAX_TOKENS, "max_in_flight_tokens")
        self._check(0, MAX_TOKENS, "kernel_block_size")
        if self.kv_cache_layout is not None:
            Order.parse(self.kv_cache_layout)

    def _check(self, least: int, most: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least, most, PlanError)
