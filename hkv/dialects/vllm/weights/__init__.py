"""Weights that vLLM 0.33 holds on each GPU, to the byte, from a config: the parameters of its own classes, by shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.weights.decoders import DECODERS
from hkv.dialects.vllm.weights.hybrids import HYBRIDS
from hkv.dialects.vllm.weights.quantization import Quantization, quantization_of
from hkv.dialects.vllm.weights.rank import Rank, unknown
from hkv.dialects.vllm.weights.towers import TOWERS, Tower
from hkv.model.huggingface.common_fields import scalings_of, served_dtype
from hkv.model.huggingface.family import type_of, words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.model import stage_bounds
from hkv.model.huggingface.reading import decoder_fields
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
    positions and other buffers are not among them. Weights that are not known are refused by name.
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


ROTATED = frozenset(
    words(
        """
        exaone4 gemma2 gemma3_text gemma4_text llama llama4_text minimax_m2 ministral3 mistral mixtral phi3 qwen2 qwen3
        qwen3_moe qwen3_next
        """
    )
)
"""Families whose tables of rotary positions are known, by the decoder's `model_type`."""


def rotary_tables(config: Mapping[str, Any], *, dtype: str | None = None) -> int | None:
    """Bytes of the tables of rotary positions, which every rank holds whole besides its weights; None where unknown.

    There is one row a position that the config allows, whatever `--max-model-len` is: a scaled rotation has its factor
    times as many (vLLM 0.33 `RotaryEmbeddingBase`, `get_rope`). Other buffers are small.
    """
    fields = decoder_fields(config)
    if fields.model_type not in ROTATED:
        return None
    rank = Rank(fields, 1, False, int(item_bytes(dtype or served_dtype(fields)[0])), Quantization())
    rows, sizes = rank.number("max_position_embeddings"), [fields.head_dim.value]
    factor = 1.0
    for kind, scaling, _ in scalings_of(fields):
        if kind in ("linear", "dynamic", "yarn"):
            factor = float(scaling.get("factor") or 1)
        if kind == "yarn":
            rows = int(scaling.get("original_max_position_embeddings") or rows)
    if fields.model_type == "gemma4_text":
        sizes.append(rank.number("global_head_dim"))
    part = float(rank.value("partial_rotary_factor", 1))
    size = rank.number("rotary_dim", default=0) or sum(int(each * part) for each in sizes)
    local = rows * size if fields.model_type == "gemma3_text" else 0  # windows turn without a factor
    return rank.vector(int(rows * factor) * size + local)


def _tower(fields: Fields, outer: str) -> Tower | None:
    """The encoders around a decoder; None for a decoder alone."""
    if outer in TOWERS:
        return TOWERS[outer]
    if fields.path or (outer and outer != fields.model_type):
        raise unknown("model_type", outer, "a model around a decoder whose weights are known")
    return None
