"""A model, a memory budget and a parallel shape: the plan, what fits, and what limits it."""

from __future__ import annotations

import dataclasses
import functools

from hkv.dialects.vllm.planning.pages import align_states
from hkv.dialects.vllm.planning.plan import Plan, PlanOptions
from hkv.dialects.vllm.planning.residency import Residency, simulate
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.errors import PlanError
from hkv.layout.orders import Order
from hkv.limits import MAX_MEMORY, MAX_RANKS, MAX_TOKENS, check_whole
from hkv.model.huggingface import Model
from hkv.spec import LayerSpec, RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """Settings with which a model is served, besides its config. Sizes are for one tensor-parallel rank.

    Attributes:
      memory: bytes for the cache on each GPU, or one number for the GPUs of each stage.
      pipeline_parallel: stages.
      context_parallel: ranks that split the tokens of full-attention layers.
      kernel_block_size: tokens of which attention blocks are multiples next to recurrent states, 0 for 16.
      layout: name of the physical order, or None for the first that can express the model.
      max_model_len: tokens of the longest request; None for the model's, 0 for the longest that fits.
      max_in_flight_tokens: tokens scheduled and not yet settled, over all requests and steps.
      max_num_encoder_input_tokens: tokens of encoders' inputs in one step.
      concurrent_batches: steps that run at the same time, with an equal share of these tokens each.
      num_gpu_blocks_override: number of blocks, whatever the memory, or None.
      prefix_match_unit: tokens between two hashes, or None for the largest that all groups allow.
      prefill_lookahead: prompt tokens past the computed ones that a draft reads.
      drops_block: a hit drops the last block of the draft's group; None where there is a draft.
      caching: prefix caching is on; recurrent states are then kept at block boundaries.
      hybrid: False caches every layer like full attention.
      bugs: names of upstream defects to reproduce.
    """

    memory: int | tuple[int, ...]
    pipeline_parallel: int = 1
    context_parallel: int = 1
    kernel_block_size: int = 0
    layout: str | None = None
    max_model_len: int | None = None
    max_in_flight_tokens: int = 8192
    max_num_encoder_input_tokens: int = 8192
    concurrent_batches: int = 1
    num_gpu_blocks_override: int | None = None
    prefix_match_unit: int | None = None
    prefill_lookahead: int = 0
    drops_block: bool | None = None
    caching: bool = True
    hybrid: bool = True
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for size in self.stage_memory:
            check_whole("memory", size, 0, MAX_MEMORY, PlanError)
        check_whole("kernel_block_size", self.kernel_block_size, 0, MAX_TOKENS, PlanError)
        for name in ("pipeline_parallel", "context_parallel", "concurrent_batches"):
            check_whole(name, getattr(self, name), 1, MAX_RANKS, PlanError)

    @property
    def stage_memory(self) -> tuple[int, ...]:
        """Bytes for the cache on each GPU of each stage."""
        return self.memory if isinstance(self.memory, tuple) else (self.memory,) * self.pipeline_parallel


@dataclasses.dataclass(frozen=True)
class ServedPlan:
    """Plan for a model with given settings, and what a simulation says of it.

    Attributes:
      plan: groups, blocks and tensors.
      limits: the longest request that the plan is for.
      stages: each pipeline stage's layers.
      options: options that the plan was made with.
      concurrent_batches: steps that run at the same time.
    """

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

    @property
    def limited_by(self) -> str:
        """Limit that keeps the next request out, in words."""
        plan = self.plan
        if not plan.groups:
            return "nothing: the model caches nothing"
        shares = self.residency.full_length_blocks
        widest = max(range(len(shares)), key=lambda index: shares[index])
        spec, share = plan.groups[widest].spec, shares[widest]
        where = f"memory of stage {plan.limited_by}" if len(plan.workers) > 1 else "memory"
        total = sum(shares)
        return (
            f"{where}: a request of {self.limits.max_model_len} tokens holds {total} blocks, "
            f"{share} of them in g{widest} ({spec.kind})"
        )


def serve(model: Model, serving: Serving, draft: Model | None = None) -> ServedPlan:
    """The plan of vLLM 0.33 for a model, and how many of its longest requests fit at once.

    The layers of a draft module, a model that was read as a draft, join the last stage.
    """
    length = model.max_model_len if serving.max_model_len in (None, 0) else serving.max_model_len
    mode = "align" if serving.caching else "none"
    limits = RequestLimits(
        max_model_len=length,
        max_in_flight_tokens=serving.max_in_flight_tokens,
        max_num_encoder_input_tokens=serving.max_num_encoder_input_tokens,
        context_parallel=serving.context_parallel,
        mamba_mode=mode,
    )
    stages = _stages(model, draft, serving, limits)
    options = PlanOptions(
        limits=limits,
        layout=serving.layout and Order.parse(serving.layout).value,
        supported_layouts=model.layouts,
        tensor_parallel=model.tensor_parallel,
        hybrid=serving.hybrid,
        auto_fit=serving.max_model_len == 0,
        num_blocks=serving.num_gpu_blocks_override,
        eagle=draft is not None if serving.drops_block is None else serving.drops_block,
        prefill_lookahead=serving.prefill_lookahead,
        prefix_match_unit=serving.prefix_match_unit,
        caching=serving.caching,
        bugs=serving.bugs,
    )
    plan = plan_vllm(stages, serving.stage_memory, options)
    limits = limits.with_max_model_len(plan.max_model_len)
    return ServedPlan(plan, limits, tuple(stages), options, serving.concurrent_batches)


def _stages(model: Model, draft: Model | None, serving: Serving, limits: RequestLimits) -> list[dict[str, LayerSpec]]:
    """Each stage's layers, attention blocks made long enough for recurrent states."""
    stages = model.stage_specs(serving.pipeline_parallel)
    if draft is not None:
        if draft.model_type and any(spec.snapshot for spec in draft.specs.values()):
            raise PlanError("draft", draft.model_type, "a draft without recurrent states")
        stages[-1] |= {f"draft.{name}": spec for name, spec in draft.specs.items()}
    whole = {name: spec for stage in stages for name, spec in stage.items()}
    aligned = align_states(
        whole,
        kernel_block_size=serving.kernel_block_size or 16,
        mamba_mode=limits.mamba_mode,
        max_model_len=limits.max_model_len,
    )
    return [{name: aligned[name] for name in stage} for stage in stages]
