"""Options of `vllm serve` that the cache depends on, under vLLM 0.33's names; None is left to the engine."""

from __future__ import annotations

import dataclasses

from hkv.dialects.vllm.planning.devices import DEFAULT_DEVICE, device_of
from hkv.dialects.vllm.planning.speculation import Speculation
from hkv.errors import ConfigError, PlanError
from hkv.layout.orders import Order
from hkv.limits import MAX_BLOCKS, MAX_MEMORY, MAX_RANKS, MAX_TOKENS, check_whole

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
      device: name of the GPU (`hkv.dialects.vllm.planning.devices`); vLLM's defaults depend on it.
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
