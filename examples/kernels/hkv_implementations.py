"""HKV's operations under test, by each of their implementations; kernels are interpreted on a CPU.

hkv check-kernel examples/kernels/hkv_implementations.py:xla.write
hkv check-kernel examples/kernels/hkv_implementations.py:pallas_triton.gather
hkv check-kernel examples/kernels/hkv_implementations.py:mosaic.copy_blocks
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

import hkv
from hkv.errors import ConfigError
from hkv.testing.kernels import kernel

SUPPORTS: dict[str, Any] = {
    "has": ("missing ids",),
    "lacks": ("tensor scales", "own scales"),
    "reuse": 10,
}


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of `hkv.paged` by one implementation."""

    implementation: str

    @kernel("write", **SUPPORTS)
    def write(
        self, buffer: Array, layout: hkv.Layout, layer: int, blocks: Array, states: Array, values: dict[str, Array]
    ) -> Array:
        """`hkv.write`."""
        return self._told(hkv.write, buffer, layout, layer, blocks, states, values)

    @kernel("gather", **SUPPORTS)
    def gather(self, buffer: Array, layout: hkv.Layout, layer: int, table: Array) -> dict[str, Array]:
        """`hkv.gather`."""
        return self._told(hkv.gather, buffer, layout, layer, table)

    @kernel("scatter", **SUPPORTS)
    def scatter(self, buffer: Array, layout: hkv.Layout, layer: int, table: Array, values: dict[str, Array]) -> Array:
        """`hkv.scatter`."""
        return self._told(hkv.scatter, buffer, layout, layer, table, values)

    @kernel("copy_blocks", **SUPPORTS)
    def copy_blocks(self, buffer: Array, layout: hkv.Layout, sources: Array, targets: Array) -> Array:
        """`hkv.copy_blocks`."""
        return self._told(hkv.copy_blocks, buffer, layout, sources, targets)

    @kernel("zero", **SUPPORTS)
    def zero(self, buffer: Array, layout: hkv.Layout, blocks: Array) -> Array:
        """`hkv.zero_blocks`."""
        return self._told(hkv.zero_blocks, buffer, layout, blocks)

    def _told(self, operation: Any, *arguments: Any) -> Any:
        try:
            return operation(*arguments, implementation=self.implementation)[0]
        except ConfigError:
            raise NotImplementedError("runs that this implementation cannot move") from None


xla = Operations("xla")
pallas_triton = Operations("pallas_triton:interpret")
mosaic = Operations("mosaic:interpret")
