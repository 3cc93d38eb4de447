"""Input of a plan besides the layers: lengths, parallel shape, layout and switches of the engine."""

from __future__ import annotations

import dataclasses

from hkv.bugs import check_bugs
from hkv.errors import PlanError
from hkv.layout.orders import Order
from hkv.spec import RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The switches of vLLM 0.33 that planning reads.

    Attributes:
      limits: longest request, tokens in flight, context parallelism, Mamba mode.
      layout: name of the physical order, or None to take the first that can express the model.
      supported_layouts: orders that the model's attention backends accept, best first; None for all.
      tensor_parallel: ranks that split the heads.
      hybrid: False gives every layer the blocks of full attention (`disable_hybrid_kv_cache_manager`).
      auto_fit: lower `max_model_len` to what fits.
      num_blocks: number of blocks, whatever the memory (`num_gpu_blocks_override`), or None.
      eagle: a draft module whose groups drop a block after a hit is in use.
      prefill_lookahead: tokens that a multi-module draft looks ahead in prefill.
      caching: prefix caching or a connector is on, so that block hashes are used.
      prefix_match_unit: tokens between two hashes, or None for the largest that all groups allow.
      bugs: names of upstream defects to reproduce (`hkv.bugs`).
    """

    limits: RequestLimits
    layout: str | None = None
    supported_layouts: tuple[str, ...] | None = None
    tensor_parallel: int = 1
    hybrid: bool = True
    auto_fit: bool = False
    num_blocks: int | None = None
    eagle: bool = False
    prefill_lookahead: int = 0
    caching: bool = True
    prefix_match_unit: int | None = None
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_bugs(self.bugs)
        for name in ("layout", *(self.supported_layouts or ())):
            if name != "layout":
                Order.parse(name)
        if self.layout is not None:
            Order.parse(self.layout)
        for name in ("tensor_parallel", "num_blocks", "prefix_match_unit"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise PlanError(name, value, "a positive integer")
        if type(self.prefill_lookahead) is not int or self.prefill_lookahead < 0:
            raise PlanError("prefill_lookahead", self.prefill_lookahead, "a non-negative integer")
