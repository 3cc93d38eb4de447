"""First and last layers that keep the model's own element type where the others are packed (vLLM 0.33 TurboQuant)."""

from __future__ import annotations

import dataclasses

from hkv.model.huggingface import Model

KEPT = 2
"""Layers kept at either end of a model without recurrent states (vLLM 0.33 `get_boundary_skip_layers`)."""

KERNEL_BLOCK = 16
"""Tokens of the smallest block that kernels of either sort take."""


def keeps_layers(model: Model, kv_cache_dtype: str) -> bool:
    """True if some layers of the model keep their own element type under this packing."""
    return kv_cache_dtype.startswith("turboquant_") and not any(spec.snapshot for spec in model.specs.values())


def common_block_size(model: Model, block_size: int | None) -> int:
    """Tokens per block with which a page of packed layers is no smaller than a kept layer's smallest.

    vLLM 0.33 `_align_heterogeneous_kv_block_size`. It asks the first layer's kernels for the packed bytes of a token,
    and those know only one byte an element.

    Args:
      model: the model, read in its own element type.
      block_size: tokens that were asked for, or None.
    """
    unit = max(KERNEL_BLOCK, block_size or KERNEL_BLOCK)
    first = model.attention_specs[0]
    elements = first.num_kv_heads * (first.head_size + first.value_size)
    kept = KERNEL_BLOCK * first.num_heads * first.content_bytes
    return max(unit, unit * -(-kept // (unit * elements)))


def with_kept_layers(packed: Model, own: Model) -> Model:
    """The packed model with its first and last layers as in `own`.

    Args:
      packed: read under the packing.
      own: read in the model's own element type, with blocks of the same size.
    """
    kept = min(KEPT, packed.num_layers // 2)
    middle = range(kept, packed.num_layers - kept)
    pairs = zip(packed.layers, own.layers, strict=True)
    return dataclasses.replace(packed, layers=tuple(a if a.index in middle else b for a, b in pairs))
