"""Block tables as engines keep them, and the addresses that kernels make of them (`docs/layouts.md`).

`rows` has the operations on requests' rows of blocks and kernel blocks, `BlockRows`; `slots` says where tokens lie, on
which rank, and what a forward pass is given. All are jitted functions of arrays, one group of layers at a time; `vmap`
serves several.
"""

from hkv.block_tables import rows, slots

__all__ = ["rows", "slots"]
