"""Bytes of a pool as arrays, wherever a layout puts them: `numpy.view` and `torch.view` share memory with it.

JAX arrays are dense, so `jax.read_blocks` and `jax.write_blocks` move the blocks that are asked for. Each takes the
`StridedView` of a layer or of a part that a layout gives (`docs/layouts.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader

if TYPE_CHECKING:
    from hkv.layout.views import jax, numpy, torch

__all__ = ["jax", "numpy", "torch"]

__getattr__ = loader(__name__, {f"hkv.layout.views.{name}": name for name in __all__})
