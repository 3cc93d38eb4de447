"""Layers of one type: those that need the same token slots, so that one block table serves them all."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.spec.layer import LayerSpec


def is_uniform_type(specs: Sequence[LayerSpec]) -> bool:
    """True if one block table serves all of `specs` (vLLM 0.33 `UniformTypeKVCacheSpecs.is_uniform_type`).

    They need one block size, the same split under context parallelism, and what the first layer's kind asks for. Page
    sizes may differ. The first layer decides: a plain window layer accepts latent ones of its window, not the reverse.

    Args:
      specs: at least one layer.
    """
    if len({spec.block_size for spec in specs}) > 1 or len({is_cp_sharded(spec) for spec in specs}) > 1:
        return False
    return specs[0].is_uniform_with(specs)


def is_cp_sharded(spec: LayerSpec) -> bool:
    """True if context parallelism splits this layer's tokens over ranks."""
    return spec.shared_by_ranks
