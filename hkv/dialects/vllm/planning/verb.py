"""The plan of a model's cache as a typed value: what `hkv plan` says, and what goes on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hkv.bugs import bugs_of_part
from hkv.byte_size import parse_bytes
from hkv.columns import Columns, columns
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.planning.cache_config import cache_config
from hkv.dialects.vllm.planning.report import served_report, tensor_layout
from hkv.dialects.vllm.planning.served import ServedPlan, Serving, serve
from hkv.layout.block_layout import Layout
from hkv.model.huggingface import Model


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A model's cache in a given memory.

    Attributes:
      model: the model.
      served: groups, workers and tensors, and how many of the longest requests fit.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.
    """

    model: Model
    served: ServedPlan
    kernel_block_size: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.served.plan.num_blocks

    @property
    def requests(self) -> int:
        """Requests of the longest length that fit at once."""
        return self.served.residency.requests

    @property
    def groups(self) -> Columns:
        """One entry a group: `kind`, `layers` (how many), `block_size`, `bytes_per_block`, `padding_bytes`."""
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

    def config(self, *, caching: bool = True) -> VllmConfig:
        """The cache that manages the plan's blocks, for `hkv.init`.

        Args:
          caching: whether prefixes are reused.

        Raises:
          PlanError: the model caches nothing.
        """
        return cache_config(self.served.plan, self.served.limits, caching=caching)

    def report(self) -> dict[str, Any]:
        """Everything as plain values: what `hkv plan --json` writes."""
        return served_report(self.model, self.served, self.kernel_block_size)


def plan(
    model: Model,
    memory: int | str,
    *,
    draft: Model | None = None,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    kernel_block_size: int = 0,
    layout: str | None = None,
    max_model_len: int | None = None,
    max_in_flight_tokens: int = 8192,
    caching: bool = True,
    hybrid: bool = True,
    bugs: Sequence[str] = (),
) -> CachePlan:
    """Groups, pages, block counts and tensors of a model, as vLLM 0.33 plans them (`hkv plan`).

    Args:
      model: the model, from `read_model`.
      memory: for the cache on each GPU, in bytes or as text such as `80GiB`.
      draft: a draft module, read with `draft=True`.
      pipeline_parallel: stages.
      context_parallel: ranks that split the tokens of full-attention layers.
      kernel_block_size: tokens of a kernel block, 0 for the whole block.
      layout: name of the physical order, or None for the first that can express the model.
      max_model_len: tokens of the longest request; None for the model's, 0 for the longest that fits.
      max_in_flight_tokens: tokens scheduled at once, over all requests.
      caching: whether prefixes are reused.
      hybrid: False caches every layer like full attention.
      bugs: names of upstream defects to reproduce.

    Raises:
      PlanError: the model does not fit, or cannot be laid out so.
      ConfigError: no such size or defect.
    """
    serving = Serving(
        memory=parse_bytes(memory) if isinstance(memory, str) else memory,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
        kernel_block_size=kernel_block_size,
        layout=layout,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        caching=caching,
        hybrid=hybrid,
        bugs=frozenset(bugs_of_part(bugs, "planning")),
    )
    return CachePlan(model, serve(model, serving, draft), kernel_block_size)
