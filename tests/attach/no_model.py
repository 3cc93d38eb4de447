"""An executor of vLLM's without a model: two groups of layers, and tokens that follow from the step."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput

LAYER = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


class NoModel(Executor):
    """All of vLLM but its workers: `LLM(distributed_executor_backend="tests.attach.no_model.NoModel")`."""

    supported_tasks = ("generate",)  # type: ignore[assignment]

    def _init_executor(self) -> None:
        self.prompts: dict[str, int] = {}

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [{"full": FullAttentionSpec(**LAYER), "near": SlidingWindowSpec(**LAYER, sliding_window=48)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def determine_available_memory(self) -> list[int]:
        return [1 << 20]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """There are no workers."""

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> list[Any]:
        return [None]

    def check_health(self) -> None:
        """Nothing can be ill."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        ids, known = list(scheduler_output.num_scheduled_tokens), {}
        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id] = len(new.prompt_token_ids)
            known[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        known |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {id: known[id] + count for id, count in scheduler_output.num_scheduled_tokens.items()}
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=[[ends[id] % 7] if ends[id] >= self.prompts[id] else [] for id in ids],
        )
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done
