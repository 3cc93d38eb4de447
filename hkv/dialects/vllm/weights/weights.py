"""A config's weights on each pipeline stage of a tensor-parallel rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.weights.decoders import DECODERS
from hkv.dialects.vllm.weights.hybrids import HYBRIDS
from hkv.dialects.vllm.weights.quantization import quantization_of
from hkv.dialects.vllm.weights.rank import Rank
from hkv.dialects.vllm.weights.towers import TOWERS, Tower
from hkv.errors import ConfigError
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import stage_bounds
from hkv.model.huggingface.reading import decoder_fields
from hkv.model.huggingface.served_dtype import served_dtype
from hkv.model.huggingface.wrappers import type_of
from hkv.spec.dtypes import item_bytes

FAMILIES = {**DECODERS, **HYBRIDS}
"""Families whose weights are known, by the decoder's `model_type`."""


def weights_of(
    config: Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str | None = None,
    capability: tuple[int, int] = (9, 0),
) -> tuple[int, ...]:
    """Bytes of parameters on each pipeline stage, on the tensor-parallel rank that holds most of them.

    The parameters are those of vLLM's model class when it is made, before a kernel repacks them. Tables of rotary
    positions and other buffers are not among them.

    Args:
      config: the content of a `config.json`.
      tensor_parallel: ranks that split the layers.
      pipeline_parallel: stages.
      expert_parallel: experts are dealt out to ranks, not split.
      dtype: the model's element type; None for its config's.
      capability: compute capability of the GPU.

    Raises:
      ConfigError: a family, a packing or an encoder whose weights HKV does not know, or a field that the file lacks.
      PlanError: the ranks cannot share the layers.
    """
    fields = decoder_fields(config)
    family = FAMILIES.get(fields.model_type)
    if family is None:
        raise unknown("model_type", fields.model_type, "a family whose weights are known")
    width = int(item_bytes(dtype or served_dtype(fields)[0]))
    quantization = quantization_of(fields, tensor_parallel, capability)
    rank = Rank(fields, tensor_parallel, expert_parallel, width, quantization)
    outer = type_of(config)
    tower = _tower(fields, outer)
    found = family(rank, "model." if tower is None else "language_model.model.")
    whole = dataclasses.replace(found, encoders=0 if tower is None else tower(rank))
    return whole.stages(stage_bounds(len(found.layers), pipeline_parallel))


def _tower(fields: Fields, outer: str) -> Tower | None:
    """The encoders around a decoder; None for a decoder alone."""
    if outer in TOWERS:
        return TOWERS[outer]
    if fields.path or (outer and outer != fields.model_type):
        raise unknown("model_type", outer, "a model around a decoder whose weights are known")
    return None


def unknown(name: str, value: Any, expected: str) -> ConfigError:
    """The refusal of weights that nobody knows."""
    return ConfigError(name, value, f"{expected}; else --weights SIZE says them")
