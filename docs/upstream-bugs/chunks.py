"""The defects of LMCache 0.5.6 about chunk objects, each in the smallest groups that show it: the contract, the defect.

Example:
  python docs/upstream-bugs/chunks.py
"""

from __future__ import annotations

from collections.abc import Callable

from hkv.chunks.detection import Hints, TensorView, detect
from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.chunks.kernel_groups import EngineGroupInfo, KernelGroup, PageGeometry, group_layers
from hkv.chunks.objects import object_groups, object_layout
from hkv.chunks.plans import null_chunks
from hkv.errors import LayoutError

Bugs = frozenset[str]

FORMAT = EngineKVFormat(1)
PAGES = PageGeometry(FORMAT, TRAITS[FORMAT].kv_size, 1, 100, 16, 8, 64, "bfloat16")
RECURRENT = KernelGroup((0,), PAGES, EngineGroupInfo(0, (0,), window=16, recurrent=True))


def group_key(bugs: Bugs) -> str:
    """Two latent layers, of 8 and of 9 blocks."""
    views = [TensorView((8, 64, 576)), TensorView((9, 64, 576))]
    found = group_layers([EngineKVFormat(3)] * 2, views, bugs=bugs)
    return f"groups of {', '.join(str(group.geometry.num_blocks) for group in found)} blocks"


def full_window(bugs: Bugs) -> str:
    """A recurrent group that keeps the last 16 tokens of a chunk of 32, with whole chunks kept of windowed groups."""
    (found,) = object_groups([RECURRENT], 32, separate=True, full_window=True)
    layout = object_layout([RECURRENT], found, 32, full_window=True, bugs=bugs)
    return f"{layout.region(0).slots} slots of each chunk"


def null_mask(bugs: Bugs) -> str:
    """Two chunks whose kept blocks are 5 and the null block."""
    (found,) = object_groups([RECURRENT], 32, separate=True)
    nulls = null_chunks([RECURRENT], found, [[0, 5, 7, 0]], 32, bugs=bugs)
    return f"stored: {', '.join(f'chunk {i}' for i, null in enumerate(nulls) if not null)}"


def two_blocks(bugs: Bugs) -> str:
    """A layer of two blocks, K and V apart: `[2, 2, slots, heads, elements]` either way."""
    try:
        found, _ = detect([TensorView((2, 2, 16, 8, 64))], "vllm", Hints("NHD"), bugs)
    except LayoutError as refusal:
        return f"refused: {refusal.argument} = {refusal.value}"
    return f"format {found.name}"


CASES: dict[str, Callable[[Bugs], str]] = {
    "lmcache-group-key": group_key,
    "lmcache-full-window": full_window,
    "lmcache-null-mask": null_mask,
    "lmcache-two-blocks": two_blocks,
}


def main() -> None:
    """Prints every case twice."""
    for name, case in CASES.items():
        print(f"{name}\n  contract: {case(frozenset())}\n  defect:   {case(frozenset({name}))}")


if __name__ == "__main__":
    main()
