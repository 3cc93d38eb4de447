"""The plan of a model's cache as a typed value: what vLLM says at start-up, groups, blocks and tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hkv.contract.plan_command import sequence_bytes
from hkv.dialects.vllm.config import VllmConfig, default_partial_hits
from hkv.dialects.vllm.planning.engine_settings import EngineSettings
from hkv.dialects.vllm.planning.plan import Plan
from hkv.dialects.vllm.planning.report import Startup, served_report, startup, tensor_layout, waste
from hkv.dialects.vllm.planning.served import ServedPlan
from hkv.errors import PlanError
from hkv.layout.block_layout import Layout
from hkv.model.huggingface import Model
from hkv.model.topology import Topology
from hkv.spec import RequestLimits

if TYPE_CHECKING:
    from hkv.columns import Columns


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A model's cache in a given memory.

    Attributes:
      model: the model.
      served: groups, workers and tensors, and how many of the longest requests fit.
      settings: settings that the engine starts with.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.
      at_most: makes the plan with the most memory that there may be, where it is estimated; else None.
    """

    model: Model
    served: ServedPlan
    settings: EngineSettings
    kernel_block_size: int = 0
    at_most: Callable[[], ServedPlan] | None = None

    @property
    def startup(self) -> Startup:
        """The numbers that vLLM 0.33 logs at start-up."""
        return startup(self.served.plan)

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
        """Reason that keeps the next request out, in words."""
        return self.served.limited_by

    @property
    def requests(self) -> int:
        """Requests of the longest length that fit at once, by simulation."""
        return self.served.residency.requests

    @property
    def most_requests(self) -> int:
        """Requests of the longest length that fit at once with the most memory that there may be."""
        return self.requests if self.at_most is None else self.at_most().residency.requests

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
        """Everything as plain values: what `hkv plan --json` writes."""
        report = served_report(self.model, self.served, self.settings, self.kernel_block_size)
        report["fits"]["most_requests"] = self.most_requests
        return report


# The block manager's configuration that a plan leads to, for those who go on to run requests through it.


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
