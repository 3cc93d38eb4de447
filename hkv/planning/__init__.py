"""Layers, memory and a parallel shape in; groups, pages, block counts and tensors out. Host-only, no JAX, no NumPy."""

from hkv.planning.options import PlanOptions
from hkv.planning.plan import CacheTensor, Plan, PlannedGroup, WorkerPlan
from hkv.planning.vllm import plan_vllm

__all__ = ["CacheTensor", "Plan", "PlanOptions", "PlannedGroup", "WorkerPlan", "plan_vllm"]
