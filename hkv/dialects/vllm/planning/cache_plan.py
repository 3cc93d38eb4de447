"""The plan of a model's cache as a typed value: groups, blocks and tensors, what fits, what vLLM says at start-up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hkv.contract.plan_command import model_record, sequence_bytes
from hkv.dialects.vllm.config import VllmConfig, default_partial_hits
from hkv.dialects.vllm.kinds import layer
from hkv.dialects.vllm.planning.engine_settings import EngineSettings
from hkv.dialects.vllm.planning.pages import align_states
from hkv.dialects.vllm.planning.plan import (
    CacheTensor,
    Plan,
    PlannedGroup,
    PlanOptions,
    group_record,
    plan_record,
    tensor_layout,
    tensor_record,
)
from hkv.dialects.vllm.planning.residency import Residency, simulate
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.errors import PlanError
from hkv.layout.block_layout import Layout
from hkv.model.huggingface import Model
from hkv.model.topology import Topology
from hkv.spec import LayerSpec, RequestLimits
from hkv.spec.attention import caches_latents

if TYPE_CHECKING:
    from hkv.columns import Columns


@dataclasses.dataclass(frozen=True)
class ServedPlan:
    """Plan for a model with given settings, each stage's layers, and what a simulation says of it."""

    plan: Plan
    limits: RequestLimits
    stages: tuple[dict[str, LayerSpec], ...]
    options: PlanOptions
    concurrent_batches: int = 1

    @functools.cached_property
    def residency(self) -> Residency:
        """Result of a simulation of requests of the longest length."""
        batches = self.concurrent_batches
        step_tokens = max(self.limits.max_in_flight_tokens // batches, 1)
        plan = self.plan
        return simulate(plan.groups, plan.usable_blocks, self.limits, step_tokens=step_tokens, batches=batches)


def serve(
    model: Model,
    memory: int | tuple[int, ...],
    *,
    draft: Model | None = None,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    kernel_block_size: int = 0,
    max_model_len: int | None = None,
    max_in_flight_tokens: int = 8192,
    max_num_encoder_input_tokens: int = 8192,
    concurrent_batches: int = 1,
    caching: bool = True,
    **options: Any,
) -> ServedPlan:
    """The plan of vLLM 0.33 for a model on one tensor-parallel rank, and how many of its longest requests fit at once.

    `memory` is in bytes for each GPU, or one number for the GPUs of each stage. The layers of `draft`, a draft module's
    own model, read as a draft, join the last stage. Attention blocks are multiples of `kernel_block_size` tokens with
    recurrent states, 0 for 16; `max_model_len` is None for the model's, 0 for the longest that fits. Tokens in flight
    are those scheduled and not yet settled, over all requests and steps, of which `concurrent_batches` run at the same
    time, with an equal share each. `caching` of prefixes keeps recurrent states at block boundaries. `options` are
    further fields of `PlanOptions`.
    """
    limits = RequestLimits(
        max_model_len=max_model_len or model.max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        max_num_encoder_input_tokens=max_num_encoder_input_tokens,
        context_parallel=context_parallel,
        mamba_mode="align" if caching else "none",
    )
    asked = PlanOptions(
        limits=limits,
        supported_layouts=model.layouts,
        tensor_parallel=model.tensor_parallel,
        auto_fit=max_model_len == 0,
        caching=caching,
        **{"eagle": draft is not None, **options},
    )
    stages = _stages(model, draft, pipeline_parallel, kernel_block_size or 16, limits)
    plan = plan_vllm(stages, memory if isinstance(memory, tuple) else (memory,) * pipeline_parallel, asked)
    return ServedPlan(plan, limits.with_max_model_len(plan.max_model_len), tuple(stages), asked, concurrent_batches)


def _stages(
    model: Model, draft: Model | None, count: int, kernel_block_size: int, limits: RequestLimits
) -> list[dict[str, LayerSpec]]:
    """Each stage's layers, attention blocks made long enough for recurrent states."""
    stages = model.stage_specs(count)
    if draft is not None:
        if draft.model_type and any(spec.snapshot for spec in draft.specs.values()):
            raise PlanError("draft", draft.model_type, "a draft without recurrent states")
        stages[-1] |= {f"draft.{name}": spec for name, spec in draft.specs.items()}
    whole = {name: spec for stage in stages for name, spec in stage.items()}
    aligned = align_states(
        whole,
        kernel_block_size=kernel_block_size,
        mamba_mode=limits.mamba_mode,
        max_model_len=limits.max_model_len,
    )
    return [{name: aligned[name] for name in stage} for stage in stages]


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A model's cache in a given memory, under the settings that the engine starts with.

    `kernel_block_size` is 0 for whole blocks. Where the memory is estimated, `at_most` plans for the most of it.
    """

    model: Model
    served: ServedPlan
    settings: EngineSettings
    kernel_block_size: int = 0
    at_most: Callable[[], ServedPlan] | None = None

    @property
    def startup(self) -> Startup:
        """The numbers that vLLM 0.33 logs at start-up (`get_kv_cache_capacity`).

        Blocks are all of the pool's, the null block among them; a request takes what is reserved for its longest
        length (`get_max_concurrency_for_kv_cache_config`).
        """
        plan = self.served.plan
        tokens = int(plan.reserved_concurrency * plan.max_model_len) if plan.request_blocks else 0
        return Startup(tokens, plan.reserved_concurrency, plan.max_model_len)

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds by vLLM's reservation: `GPU KV cache size` in its log."""
        return self.startup.tokens

    @property
    def concurrency(self) -> float:
        """Requests of the longest length that fit by vLLM's reservation: `Maximum concurrency` in its log."""
        return self.startup.concurrency

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request that the plan is for."""
        return self.served.plan.max_model_len

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.served.plan.num_blocks

    @property
    def request_blocks(self) -> int:
        """Blocks that vLLM reserves for one request of the longest length, all groups together."""
        return self.served.plan.request_blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the GPU whose blocks are the largest."""
        return max((worker.bytes_per_block for worker in self.served.plan.workers), default=0)

    @property
    def token_bytes(self) -> float:
        """Bytes on one GPU that one more token of a sequence adds for good."""
        return float(self.model.token_bytes)

    @property
    def sequence_bytes(self) -> int:
        """Bytes on one GPU that a sequence of the longest length holds besides its tokens: windows, chunks, states."""
        return sequence_bytes(self.model, self.max_model_len)

    @property
    def waste(self) -> float:
        """Share of the pool's bytes that no group fills, each group having as many blocks as a request has of it."""
        plan = self.served.plan
        blocks = self.served.residency.full_length_blocks
        total = sum(blocks)
        parts = (waste(group, self.bytes_per_block) * each for group, each in zip(plan.groups, blocks, strict=True))
        return sum(parts) / total if total else 0.0

    @property
    def limited_by(self) -> str:
        """Limit that keeps the next request out, in words."""
        plan = self.served.plan
        if not plan.groups:
            return "nothing: the model caches nothing"
        shares = self.served.residency.full_length_blocks
        widest = max(range(len(shares)), key=lambda index: shares[index])
        where = f"memory of stage {plan.limited_by}" if len(plan.workers) > 1 else "memory"
        return (
            f"{where}: a request of {plan.max_model_len} tokens holds {sum(shares)} blocks, "
            f"{shares[widest]} of them in g{widest} ({plan.groups[widest].spec.kind})"
        )

    @property
    def requests(self) -> int:
        """Requests of the longest length that fit at once, by simulation."""
        return self.served.residency.requests

    @property
    def most_requests(self) -> int:
        """Requests of the longest length that fit at once with the most memory that there may be."""
        return self.requests if self.at_most is None else self.at_most().residency.requests

    @property
    def not_started(self) -> str:
        """Reason why vLLM 0.33 does not start so, and options with which it does; empty where it starts.

        With full CUDA graphs, its default, each request of a decode step needs a block of recurrent states
        (`CompilationConfig.resolve_cudagraph_mode_and_sizes`). Where the memory is estimated, that is for the least.
        """
        wanted, specs = self.settings.max_num_seqs, (spec for group in self.served.plan.groups for spec in group.specs)
        if wanted <= self.num_blocks or not any(layer(spec).vllm_name == "MambaSpec" for spec in specs):
            return ""
        most = self.num_blocks if self.at_most is None else self.at_most().plan.num_blocks
        blocks = f"{self.num_blocks:,}" if most == self.num_blocks else f"{self.num_blocks:,} to {most:,}"
        return (
            f"{'does not' if wanted > most else 'may not'} start with CUDA graphs: max_num_seqs ({wanted}) exceeds the "
            f"{blocks} blocks, of which each request of a decode step needs one of recurrent states; "
            f"--max-num-seqs {self.num_blocks} starts"
        )

    @property
    def groups(self) -> Columns:
        """One entry a group: `kind`, `layers` (how many), `block_size`, `bytes_per_block`, `padding_bytes`."""
        from hkv.columns import columns  # NumPy: `hkv plan` does without

        return columns(
            self.served.plan.groups,
            {
                "kind": (lambda group: group.spec.kind, str),
                "layers": (lambda group: len(group.names), int),
                "block_size": (lambda group: group.spec.block_size, int),
                "bytes_per_block": (lambda group: group.page_bytes, int),
                "padding_bytes": (lambda group: group.page_bytes - group.payload_bytes, int),
            },
        )

    @property
    def tensors(self) -> Columns:
        """One entry a tensor: `worker`, `layers` (how many), and in bytes `offset`, `layer_stride`, `block_stride`."""
        from hkv.columns import columns

        rows = [(index, tensor) for index, worker in enumerate(self.served.plan.workers) for tensor in worker.tensors]
        return columns(
            rows,
            {
                "worker": (lambda row: row[0], int),
                "layers": (lambda row: len(row[1].layers), int),
                "offset": (lambda row: row[1].offset, int),
                "layer_stride": (lambda row: row[1].layer_stride, int),
                "block_stride": (lambda row: row[1].block_stride, int),
            },
        )

    def layouts(self, worker: int = 0) -> dict[str, tuple[Layout, int]]:
        """Layout and index of each layer of a worker: the layout of its tensor, and its index there."""
        plan = self.served.plan
        return {
            name: (layout, index)
            for tensor in plan.workers[worker].tensors
            for layout in [tensor_layout(tensor, plan, self.kernel_block_size)]
            for index, name in enumerate(tensor.layers)
        }

    def config(self, *, caching: bool | None = None) -> VllmConfig:
        """The cache that manages the plan's blocks, for `hkv.init`."""
        chosen = self.settings.enable_prefix_caching if caching is None else caching
        return cache_config(self.served.plan, self.served.limits, caching=chosen)

    def report(self) -> dict[str, Any]:
        """Everything as plain values: what `hkv plan --json` writes.

        Sizes are in bytes; shapes and strides are in the order L, B, H, N, C.
        """
        plan, residency, said = self.served.plan, self.served.residency, self.startup
        return plan_record(plan) | {
            "model": model_record(self.model, plan.max_model_len),
            "startup": {
                "gpu_kv_cache_size_tokens": said.tokens,
                "max_concurrency": said.concurrency if said.line else None,
                "line": said.line,
                "not_started": self.not_started,
                "why_simulation_differs": why_counts_differ(plan, residency),
            },
            "settings": dataclasses.asdict(self.settings) | {"memory": min(self.settings.memory.stages)},
            "memory": self.settings.memory.record(),
            "bytes_per_block": self.bytes_per_block,
            "groups": [self._group_record(index) for index in range(len(plan.groups))],
            "tensors": [[self._tensor_record(tensor) for tensor in worker.tensors] for worker in plan.workers],
            "fits": {
                "requests": residency.requests,
                "tokens": residency.requests * plan.max_model_len,
                "peak_usage_blocks": residency.peak_usage,
                "reserved_concurrency": plan.reserved_concurrency if plan.request_blocks else None,
                "limited_by": self.limited_by,
                "most_requests": self.most_requests,
            },
        }

    def _group_record(self, index: int) -> dict[str, Any]:
        group = self.served.plan.groups[index]
        return group_record(group) | {
            "kind": group.spec.kind,
            "class": type(group.spec).__name__,
            "bytes_per_block": group.page_bytes,
            "padding_bytes": group.page_bytes - group.payload_bytes,
            "unused_bytes": self.bytes_per_block - group.page_bytes,
            "full_length_blocks": self.served.residency.full_length_blocks[index],
            "peak_blocks": self.served.residency.peak_blocks[index],
        }

    def _tensor_record(self, tensor: CacheTensor) -> dict[str, Any]:
        layout = tensor_layout(tensor, self.served.plan, self.kernel_block_size)
        shaped = {"shape": list(layout.shape), "strides": list(layout.strides), "dtype": layout.dtype}
        return tensor_record(tensor) | shaped


def copies_in_a_chunk(plan: Plan, tensor_parallel: int) -> int:
    """Workers whose blocks a chunk of the second tier holds: one of those that hold the same latents, else all.

    vLLM 0.33 `build_offloading_config`, `replicated_layout`, of workers that share a machine.
    """
    latent = any(caches_latents(spec) for group in plan.groups for spec in group.specs)
    alone = len(plan.workers) == 1 and plan.workers[0].tp_replicas == tensor_parallel
    return 1 if latent and alone else tensor_parallel * len(plan.workers)


def waste(group: PlannedGroup, bytes_per_block: int) -> float:
    """Share of a block's bytes that the group leaves unused: padding of pages, and the room up to the widest group."""
    return 1 - group.payload_bytes / bytes_per_block if bytes_per_block else 0.0


def cache_config(plan: Plan, limits: RequestLimits, *, caching: bool = True) -> VllmConfig:
    """The configuration under which vLLM 0.33's scheduler manages the plan's blocks.

    A mixed group is managed by its first layer (vLLM 0.33 `generate_scheduler_kv_cache_config`).
    """
    if not plan.groups:
        raise PlanError("plan", plan.groups, "at least one group to manage")
    groups = plan.topology_groups()
    specs = [group.spec for group in groups]
    ranks = limits.context_parallel
    return VllmConfig(
        topology=Topology(groups),
        num_blocks=plan.num_blocks,
        hash_block_size=plan.hash_block_size,
        scheduler_block_size=plan.scheduler_block_size,
        caching=caching,
        eagle=any(group.eagle for group in groups),
        partial_hits=default_partial_hits(specs, plan.hash_block_size, ranks, caching),
        max_model_len=limits.max_model_len,
        max_in_flight_tokens=limits.max_in_flight_tokens,
        context_parallel=ranks,
    )


# The two numbers that vLLM 0.33 logs at start-up, to the digit, and how HKV's own count differs from them.


@dataclasses.dataclass(frozen=True)
class Startup:
    """Numbers that vLLM 0.33 logs of its cache (`update_kv_cache_capacity`).

    Of a model that caches nothing, vLLM says nothing, and the concurrency is infinite.
    """

    tokens: int
    concurrency: float
    max_model_len: int

    @property
    def line(self) -> str:
        """The line of the log; empty for a model that caches nothing."""
        if self.concurrency == float("inf"):
            return ""
        return (
            f"GPU KV cache size: {self.tokens:,} tokens, Maximum concurrency for {self.max_model_len:,} tokens per "
            f"request: {self.concurrency:.2f}x"
        )


def why_counts_differ(plan: Plan, residency: Residency) -> str:
    """One sentence that says why the simulated number of requests is not vLLM's; empty if both are the same.

    The first of these that holds is said: fewer blocks are held at the end of a request than are reserved for its
    course, or the pool's null block and the part of a request that is left over count in vLLM's number only.
    """
    if not plan.request_blocks:
        return ""
    if f"{plan.reserved_concurrency:.2f}" == f"{residency.requests:.2f}":
        return ""
    held = sum(residency.full_length_blocks)
    encoded = max((group.spec.encoder_tokens for group in plan.groups), default=0)
    if held < plan.request_blocks and encoded:
        return (
            f"vLLM reserves {plan.request_blocks} blocks for each request, as if its encoder's output were as long as "
            f"a step; with {encoded} tokens of it, as the model makes at most, a request holds {held}."
        )
    if held < plan.request_blocks:
        return (
            f"vLLM reserves {plan.request_blocks} blocks for each request, as if each were computing its prompt with "
            f"all tokens in flight; HKV lets them run, and those that have come to their last token hold {held}."
        )
    return (
        f"vLLM divides all {plan.num_blocks} blocks by the {plan.request_blocks} of a request; HKV counts whole "
        "requests in the blocks that are not the null block."
    )
