"""Options of `vllm serve` that the cache depends on, under vLLM 0.33's names; None is left to the engine."""

from __future__ import annotations

import dataclasses

from hkv.dialects.vllm.planning.speculation import Speculation
from hkv.errors import ConfigError, PlanError
from hkv.layout.orders import Order
from hkv.limits import MAX_BLOCKS, MAX_MEMORY, MAX_RANKS, MAX_TOKENS, check_whole

# GPUs by name, as far as vLLM 0.33's defaults depend on one: its name, its memory and its compute capability.


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
      name: its name for `--device`.
      driver_name: part of the name that the driver reports, in lower case; vLLM looks for `a100` in it.
      memory_gib: memory that it is sold with, in whole GiB or GB. Good enough to tell apart the classes of GPUs that
        vLLM has defaults for, 70 GiB and 160 GiB being the limits; cards and drivers differ in what they report, so
        that no plan computes with it.
      capability: compute capability, major and minor.
      reported: GiB that such a card reports as its whole memory (`torch.cuda.mem_get_info`), as PyTorch names it where
        memory runs out: the least that was found in public reports, or None where none was. Cards and drivers differ
        by a few tenths of a GiB.
      source: one such report.
    """

    name: str
    driver_name: str
    memory_gib: int
    capability: tuple[int, int]
    reported: float | None = None
    source: str = ""


DEVICES = {
    device.name: device
    for device in (
        Device("h100", "nvidia h100 80gb hbm3", 80, (9, 0), 79.11, "https://github.com/vllm-project/vllm/issues/27508"),
        Device("h200", "nvidia h200", 141, (9, 0), 139.72),
        Device("h20", "nvidia h20", 96, (9, 0)),
        Device("h800", "nvidia h800", 80, (9, 0)),
        Device("gh200", "nvidia gh200 480gb", 96, (9, 0)),
        Device("b200", "nvidia b200", 180, (10, 0), 178.35),
        Device("gb200", "nvidia gb200", 186, (10, 0)),
        Device("b300", "nvidia b300", 288, (10, 3)),
        Device("gb300", "nvidia gb300", 288, (10, 3)),
        Device("gb10", "nvidia gb10", 128, (12, 1)),
        Device(
            "a100", "nvidia a100-sxm4-80gb", 80, (8, 0), 79.25, "https://github.com/levihsu/OOTDiffusion/issues/235"
        ),
        Device("a100-40gb", "nvidia a100-sxm4-40gb", 40, (8, 0), 39.50, "https://github.com/TianheWu/CoSeR/issues/10"),
        Device("a800", "nvidia a800-sxm4-80gb", 80, (8, 0)),
        Device("a40", "nvidia a40", 48, (8, 6), 44.35),
        Device("a10", "nvidia a10", 24, (8, 6), 21.96, "https://github.com/rhymes-ai/Aria/issues/24"),
        Device("a6000", "nvidia rtx a6000", 48, (8, 6)),
        Device("l40s", "nvidia l40s", 48, (8, 9), 44.39),
        Device("l40", "nvidia l40", 48, (8, 9), 44.40, "https://github.com/QwenLM/Qwen3-VL/issues/2097"),
        Device("l4", "nvidia l4", 24, (8, 9), 21.96, "https://github.com/rhymes-ai/Aria/issues/24"),
        Device("rtx3090", "nvidia geforce rtx 3090", 24, (8, 6)),
        Device(
            "rtx4090",
            "nvidia geforce rtx 4090",
            24,
            (8, 9),
            23.52,
            "https://github.com/Soul-AILab/SoulX-FlashTalk/issues/5",
        ),
        Device(
            "rtx5090", "nvidia geforce rtx 5090", 32, (12, 0), 31.37, "https://github.com/Wan-Video/Wan2.1/issues/465"
        ),
        Device(
            "rtx-pro-6000",
            "nvidia rtx pro 6000 blackwell server edition",
            96,
            (12, 0),
            94.97,
            "https://github.com/antirez/ds4/issues/431",
        ),
    )
}
"""Devices by name, with NVIDIA's data sheets' memory, and the compute capabilities of its CUDA GPUs page."""

DEFAULT_DEVICE = "h100"
"""Device that is assumed where none is named."""


def device_of(name: str) -> Device:
    """The device of that name, in any case."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError("device", name, f"one of {', '.join(sorted(DEVICES))}")
    return found


def reported_memory(name: str) -> int | None:
    """Bytes that such devices report as their memory; None where no report of it is known."""
    reported = device_of(name).reported
    return None if reported is None else int(reported * 1024) << 20


USAGE_CONTEXTS = ("OPENAI_API_SERVER", "LLM_CLASS", "OPENAI_BATCH_RUNNER")
"""Makers of an engine (vLLM 0.33 `UsageContext`): `vllm serve`, `LLM(...)`, `vllm run-batch`."""

PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")
"""Aims that vLLM 0.33 can be tuned for."""

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
inside a chunk, `hkv.model.huggingface.options` says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `vllm serve`, with its own defaults.

    Attributes:
      device: name of the GPU (`hkv.dialects.vllm.planning.engine_options`); vLLM's defaults depend on it.
      usage_context: one of `USAGE_CONTEXTS`; vLLM's defaults depend on it.
      kv_cache_memory_bytes: bytes for the cache on each GPU; None to compute them from those below.
      gpu_memory: bytes that the GPU reports, or None.
      gpu_memory_reported: they are what such a device reports as a rule, not what this one does.
      gpu_memory_utilization: share of them that the engine may use.
      weights: bytes of weights on each GPU, or None to compute them from the model's config.
      activations: most bytes that a forward pass and CUDA graphs take beside the weights, or None for an estimate.
      num_gpu_blocks_override: number of blocks, whatever the memory, or None.
      tensor_parallel_size: ranks that split the heads.
      pipeline_parallel_size: stages.
      data_parallel_size: engines that serve requests of their own; everything here is of one of them.
      decode_context_parallel_size: of the tensor-parallel ranks, how many split a sequence's tokens.
      enable_expert_parallel: experts are dealt out to ranks, not split.
      all2all_backend: way of tokens to their experts.
      max_model_len: tokens of the longest request; None for the model's, -1 for the longest that fits.
      max_num_batched_tokens: tokens of one step, or None.
      max_num_seqs: requests of one step, or None.
      enable_chunked_prefill: a prompt may be computed in several steps; None where the model can.
      async_scheduling: the next step is scheduled while one runs; None where nothing forbids it.
      performance_mode: one of `PERFORMANCE_MODES`; `throughput` doubles tokens and requests of a step.
      enable_prefix_caching: or None, where the model can.
      disable_hybrid_kv_cache_manager: every layer is cached like full attention; None for vLLM's choice.
      block_size: tokens per block, or None for what the kernels want.
      prefix_match_unit: tokens between two hashes, or None.
      kv_cache_layout: name of the physical order (`VLLM_KV_CACHE_LAYOUT`), or None for the first that fits.
      dtype: the model's element type, or None for its config's.
      kv_cache_dtype: element type or packing of the cache.
      state_dtype: element type of recurrent states, or None for the model's.
      gdn_prefill_backend: kernel for prompts of gated delta nets, one of `GDN_BACKENDS`; None for vLLM's choice.
      kda_prefill_backend: kernel for prompts of Kimi delta attention, one of `KDA_BACKENDS`.
      ignore_fields: names of fields of the config that HKV does not know, to be read over. vLLM has no such option.
      strict: refuse every field that HKV does not know. Nor such a one.
      speculation: drafting of tokens, or None.
      max_in_flight_tokens: tokens scheduled and not yet settled; None for those of all batches in flight. vLLM has no
        such option.
      kernel_block_size: tokens of a kernel block, of which attention blocks are multiples next to recurrent states;
        0 for 16.
    """

    device: str = DEFAULT_DEVICE
    usage_context: str = USAGE_CONTEXTS[0]
    kv_cache_memory_bytes: int | None = None
    gpu_memory: int | None = None
    gpu_memory_reported: bool = False
    gpu_memory_utilization: float = 0.92
    weights: int | None = None
    activations: int | None = None
    num_gpu_blocks_override: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str = ALL2ALL_BACKENDS[0]
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    performance_mode: str = PERFORMANCE_MODES[0]
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    block_size: int | None = None
    prefix_match_unit: int | None = None
    kv_cache_layout: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    state_dtype: str | None = None
    gdn_prefill_backend: str | None = None
    kda_prefill_backend: str = "auto"
    ignore_fields: tuple[str, ...] = ()
    strict: bool = False
    speculation: Speculation | None = None
    max_in_flight_tokens: int | None = None
    kernel_block_size: int = 0

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
        for name in ("kv_cache_memory_bytes", "gpu_memory", "weights", "activations"):
            self._check(name, 0, MAX_MEMORY)
        if not 0 < self.gpu_memory_utilization <= 1:  # NaN is neither
            raise PlanError("gpu_memory_utilization", self.gpu_memory_utilization, "a share, more than 0 and at most 1")
        self._check("num_gpu_blocks_override", 1, MAX_BLOCKS)
        for name in ("tensor", "pipeline", "data", "decode_context"):
            self._check(f"{name}_parallel_size", 1, MAX_RANKS)
        if self.max_model_len != -1:
            self._check("max_model_len", 1, MAX_TOKENS)
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "prefix_match_unit"):
            self._check(name, 1, MAX_TOKENS)
        self._check("max_in_flight_tokens", 1, MAX_TOKENS)
        self._check("kernel_block_size", 0, MAX_TOKENS)
        if self.kv_cache_layout is not None:
            Order.parse(self.kv_cache_layout)

    def _check(self, name: str, least: int, most: int) -> None:
        if getattr(self, name) is not None:
            check_whole(name, getattr(self, name), least, most, PlanError)
