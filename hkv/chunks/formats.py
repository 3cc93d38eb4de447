"""The engine formats: how an engine's tensors hold the pages of its layers (LMCache 0.5.6 `EngineKVFormat`), and what
LMCache is known to do wrong."""

from __future__ import annotations

import dataclasses
import enum
from types import MappingProxyType

from hkv.contract.bugs import Bug, listed

INDEXER_ROW_BYTES = 132
"""Bytes a token of a sparse-attention indexer takes: 128 fp8 values, then 4 bytes of scale."""

SCALE_BYTES = 4
"""Bytes of scale in such a row; a page holds all its values first, then all its scales."""


class EngineKVFormat(enum.IntEnum):
    """Formats by LMCache's number. The name is the shape.

    `_X_` separates list levels, `_` the axes of the innermost tensor: NB blocks, NL layers, BS slots per page, NH
    heads, HS elements per head, CS elements per head of K and V together, TWO the K and V planes, NP planes of a tuple.
    """

    NB_NL_TWO_BS_NH_HS = 0
    NL_X_TWO_NB_BS_NH_HS = 1
    NL_X_NB_TWO_BS_NH_HS = 2
    NL_X_NB_BS_HS = 3
    TWO_X_NL_X_NBBS_NH_HS = 4
    NL_X_NBBS_ONE_HS = 5
    NL_X_TWO_NB_NH_BS_HS = 6
    NL_X_NB_TWO_NH_BS_HS = 7
    NB_NL_TWO_NH_BS_HS = 8
    TWO_X_NL_X_NB_BS_NH_HS = 9
    NL_X_NB_NH_BS_TWO_HS = 10
    NL_X_NB_BS_NH_TWO_HS = 11
    NL_X_NB_NH_BS_CS = 12
    NL_X_NB_BS_NH_CS = 13
    NL_X_NB_BSV_BSS = 14
    NL_X_TWO_NB_NH_ONE_BS_HS = 15
    NL_X_TWO_X_NB_BS_NH_HS = 16
    NL_X_NP_X_NB_BS_ONE_HS = 17
    NL_X_NB_BS_NH_HS = 18


class Structure(enum.Enum):
    """Nesting of a format's tensors."""

    CROSS_LAYER = "one tensor for all layers"
    KV_LIST = "a list of K tensors and a list of V tensors"
    LAYER_LIST = "one entry a layer"


class PageOrder(enum.Enum):
    """Index of page (plane k, layer l, block b) among the pages of its tensor."""

    BLOCK_LAYER_PLANE = "(b * layers + l) * planes + k"
    PLANE_BLOCK = "k * blocks + b"
    BLOCK_PLANE = "b * planes + k"
    BLOCK = "b"


@dataclasses.dataclass(frozen=True)
class FormatTraits:
    """Traits of a format, which its name implies.

    Attributes:
      structure: nesting of its tensors.
      kv_size: planes, 2 where K and V are apart, else 1.
      page_order: order of the pages within a tensor.
      heads_first: a page is `[heads, slots, row]` rather than `[slots, heads, row]`.
      mla: the layer has one latent head, whatever head axis the tensor shows.
      fused: K and V share a row.
      padded_blocks: a block's stride may exceed its page; elsewhere pages are tight.
      block_axis: the tensor has an axis of blocks (formats 4 and 5 fuse blocks and slots).
      kernel: LMCache's CUDA block kernel moves this format.
    """

    structure: Structure
    kv_size: int
    page_order: PageOrder
    heads_first: bool = False
    mla: bool = False
    fused: bool = False
    padded_blocks: bool = False
    block_axis: bool = True
    kernel: bool = True


_LAYER = Structure.LAYER_LIST
_F = EngineKVFormat

TRAITS = MappingProxyType(
    {
        _F(0): FormatTraits(Structure.CROSS_LAYER, 2, PageOrder.BLOCK_LAYER_PLANE),
        _F(1): FormatTraits(_LAYER, 2, PageOrder.PLANE_BLOCK),
        _F(2): FormatTraits(_LAYER, 2, PageOrder.BLOCK_PLANE),
        _F(3): FormatTraits(_LAYER, 1, PageOrder.BLOCK, mla=True, padded_blocks=True),
        _F(4): FormatTraits(Structure.KV_LIST, 2, PageOrder.BLOCK, block_axis=False),
        _F(5): FormatTraits(_LAYER, 1, PageOrder.BLOCK, mla=True, block_axis=False),
        _F(6): FormatTraits(_LAYER, 2, PageOrder.PLANE_BLOCK, heads_first=True),
        _F(7): FormatTraits(_LAYER, 2, PageOrder.BLOCK_PLANE, heads_first=True),
        _F(8): FormatTraits(Structure.CROSS_LAYER, 2, PageOrder.BLOCK_LAYER_PLANE, heads_first=True),
        _F(9): FormatTraits(Structure.KV_LIST, 2, PageOrder.BLOCK),
        _F(10): FormatTraits(_LAYER, 1, PageOrder.BLOCK, heads_first=True, fused=True),
        _F(11): FormatTraits(_LAYER, 1, PageOrder.BLOCK, fused=True),
        _F(12): FormatTraits(_LAYER, 1, PageOrder.BLOCK, heads_first=True, fused=True, padded_blocks=True),
        _F(13): FormatTraits(_LAYER, 1, PageOrder.BLOCK, fused=True, padded_blocks=True),
        _F(14): FormatTraits(_LAYER, 1, PageOrder.BLOCK, mla=True, padded_blocks=True),
        _F(15): FormatTraits(_LAYER, 2, PageOrder.PLANE_BLOCK, heads_first=True, kernel=False),
        _F(16): FormatTraits(_LAYER, 2, PageOrder.BLOCK, kernel=False),
        _F(17): FormatTraits(_LAYER, 1, PageOrder.BLOCK, mla=True, padded_blocks=True, kernel=False),
        _F(18): FormatTraits(_LAYER, 1, PageOrder.BLOCK, padded_blocks=True),
    }
)
"""Traits of every format."""


def page_index(order: PageOrder, plane: int, layer: int, block: int, planes: int, layers: int, blocks: int) -> int:
    """Index of a page within its tensor, in pages.

    Plane 0 is K (or everything), 1 is V; the layer is counted within its kernel group, the block is the engine's id.
    The last three arguments are how many of each there are.
    """
    match order:
        case PageOrder.BLOCK_LAYER_PLANE:
            return (block * layers + layer) * planes + plane
        case PageOrder.PLANE_BLOCK:
            return plane * blocks + block
        case PageOrder.BLOCK_PLANE:
            return block * planes + plane
        case PageOrder.BLOCK:
            return block


def tensor_index(structure: Structure, plane: int, layer: int, layers: int) -> int:
    """Index of the tensor, among a kernel group's, that holds a page: LMCache's order of pointers."""
    match structure:
        case Structure.CROSS_LAYER:
            return 0
        case Structure.KV_LIST:
            return plane * layers + layer
        case Structure.LAYER_LIST:
            return layer


def num_tensors(structure: Structure, layers: int) -> int:
    """Tensors a kernel group of `layers` layers has."""
    return {Structure.CROSS_LAYER: 1, Structure.KV_LIST: 2 * layers, Structure.LAYER_LIST: layers}[structure]


# Known defects of LMCache 0.5.6: the contract, and what it does instead.


BUGS = listed(
    Bug(
        name="lmcache-group-key",
        engine="LMCache 0.5.6 KernelGroupIdentity",
        contract="layers of one kernel group have the same number of blocks and the same block stride",
        behaviour="neither is in the key: the first layer's are used for all, and others are read at the wrong place",
        part="chunks",
    ),
    Bug(
        name="lmcache-full-window",
        engine="LMCache 0.5.6 full_sw_kv",
        contract="keeping whole chunks of windowed groups leaves recurrent groups as they are",
        behaviour="the part of a chunk that a recurrent group keeps is widened too",
        part="chunks",
    ),
    Bug(
        name="lmcache-null-mask",
        engine="LMCache 0.5.6 store",
        contract="a chunk whose kept blocks are all null has nothing to store",
        behaviour="blocks outside the window count as well, and an object of the null block's bytes is stored",
        part="chunks",
    ),
    Bug(
        name="lmcache-two-blocks",
        engine="LMCache 0.5.6 discovery of vLLM's formats",
        contract="a tensor whose shape does not show which axis is K and V, and which the blocks, is refused",
        behaviour="of two axes of extent 2 the first is taken for K and V: two blocks that each hold K and V are read "
        "as planes, and half of what is stored is another block's",
        part="chunks",
    ),
)
