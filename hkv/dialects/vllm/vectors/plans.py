"""Vectors of plans: layers and memory, groups and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hkv.dialects.vllm.planning import plan_vllm
from hkv.dialects.vllm.planning.tensors import options_record, plan_record
from hkv.dialects.vllm.traffic.layer_sets import draw_layer_set
from hkv.errors import HKVError
from hkv.spec.records import spec_record

SEEDS = 60


def cases() -> Iterator[dict[str, Any]]:
    """Random sets of layers; those that vLLM 0.33's rules refuse say so."""
    for seed in range(SEEDS):
        drawn = draw_layer_set(seed)
        expected: dict[str, Any] = {"refused": False, "plan": None}
        try:
            expected["plan"] = plan_record(plan_vllm(drawn.workers, drawn.memory, drawn.options))
        except HKVError:
            expected["refused"] = True
        workers = [{name: spec_record(spec) for name, spec in worker.items()} for worker in drawn.workers]
        yield {
            "name": f"seed {seed}",
            "input": {"workers": workers, "memory": list(drawn.memory), "options": options_record(drawn.options)},
            "expected": expected,
        }
