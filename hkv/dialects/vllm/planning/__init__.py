"""Layers, memory and a parallel shape in; groups, pages, block counts and tensors out. Host-only, no JAX, no NumPy."""

from hkv.dialects.vllm.planning.plan import CacheTensor, Plan, PlannedGroup, PlanOptions, WorkerPlan
from hkv.dialects.vllm.planning.vllm import plan_vllm

__all__ = ["CacheTensor", "Plan", "PlanOptions", "PlannedGroup", "WorkerPlan", "plan_vllm"]
