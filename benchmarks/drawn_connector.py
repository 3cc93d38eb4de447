"""A KV connector whose loads are drawn, for `benchmarks/attach_schedulers.py`; it moves nothing."""

# pyright: reportMissingImports=false

from __future__ import annotations

import random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput


class DrawnConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads that are drawn: in the step (`sync`), while others run (`async`), or of the whole prompt (`whole`)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._loads, self._draw = extra["loads"], random.Random(extra["seed"])
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._under_way: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens after those computed that can be loaded."""
        left = request.num_tokens - num_computed_tokens
        if self._draw.random() < 0.4 or left < 2:
            return 0, False
        if self._loads == "whole":
            return left, True
        tokens = min(16 * self._draw.randrange(1, 5), (left - 1) // 16 * 16)
        return tokens, tokens > 0 and self._loads == "async"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A load begins."""
        del blocks
        if num_external_tokens and self._loads != "sync":
            self._under_way.add(request.request_id)

    def answer(self, scheduler: Any) -> KVConnectorOutput:
        """Loads that have ended, well or not."""
        ended = {id for id in sorted(self._under_way) if self._draw.random() < 0.5}
        self._under_way -= ended
        ended = {id for id in ended if id in scheduler.requests}
        failed = {id for id in sorted(ended) if self._draw.random() < 0.15}
        return KVConnectorOutput(finished_recving=ended, failed_recving=failed)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Blocks are given back at once."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Blocks are given back at once."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
