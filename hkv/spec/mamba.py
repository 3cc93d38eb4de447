"""Linear attention and Mamba: one recurrent state, snapshots of which stand at some lengths."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from hkv.errors import SpecError
from hkv.limits import MAX_BYTES, check_not_negative, check_positive
from hkv.spec.dtypes import item_bytes
from hkv.spec.layer import LayerSpec, Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba(LayerSpec):
    """A layer with a recurrent state: Mamba, gated delta net, linear attention (vLLM 0.33 `MambaSpec`).

    A block is one snapshot of the state, whatever `block_size` is; `block_size` is the distance, in tokens, between the
    lengths at which snapshots are kept.

    Attributes:
      shapes: shape of each state tensor, in the order in which they lie back to back in the page.
      dtypes: element type of each.
      page_size_padded: bytes a page takes up when padded, or None.
      num_speculative_blocks: scratch states a request holds for unverified draft tokens.
      num_prefill_checkpoint_blocks: states kept inside a prefill chunk, 0 or more.
      prefill_checkpoint_alignment: tokens; distance from a chunk's start at which such a state may stand, or None.
      checkpoints_on_grid: such a state stands where snapshots do, whatever the alignment is by itself; not part of
        equality, as the alignment says it once the distance of snapshots is known (`spanning`).
      cache_mode: `align` keeps states at block boundaries, where others can resume; `none` keeps the running state
        only, and cannot be cached (vLLM 0.33 `mamba_cache_mode`).
      tp_replicated: every tensor-parallel rank holds the whole state.
    """

    kind: ClassVar[str] = "mamba"
    written: ClassVar[Written] = Written(
        "mamba",
        (),
        ("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment", "cache_mode"),
        seldom=("cache_mode",),
    )
    snapshot: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...] = ((1,),)
    dtypes: tuple[str, ...] = ("float32",)
    page_size_padded: int | None = None
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None
    cache_mode: str = "align"
    tp_replicated: bool = False
    checkpoints_on_grid: bool = dataclasses.field(default=True, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "num_speculative_blocks", "num_prefill_checkpoint_blocks")
        if self.prefill_checkpoint_alignment is not None:
            check_positive(self, "prefill_checkpoint_alignment")
        if self.cache_mode not in ("align", "none"):
            raise SpecError("cache_mode", self.cache_mode, "align or none")
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise SpecError("dtypes", self.dtypes, f"one for each of the {len(self.shapes)} shapes, at least one")
        for shape in self.shapes:
            if not shape or min(shape) < 1 or math.prod(shape) > MAX_BYTES:
                raise SpecError("shapes", self.shapes, f"positive extents in every shape, {MAX_BYTES} bytes at most")
        if self.page_size_padded is not None and self.page_size_padded < self.unpadded_page_size_bytes:
            expected = f"at least the state's {self.unpadded_page_size_bytes} bytes"
            raise SpecError("page_size_padded", self.page_size_padded, expected)

    def readable(self, n: int) -> range:
        return range(max(0, n - 1), n)

    @property
    def keeps_states(self) -> bool:
        """True if the mode is `align`."""
        return self.cache_mode == "align"

    @property
    def state_tensors(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """`shapes` and `dtypes`, pair by pair."""
        return tuple(zip(self.shapes, self.dtypes, strict=True))

    @property
    def scratch_blocks(self) -> int:
        """`num_speculative_blocks`."""
        return self.num_speculative_blocks

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of each state tensor, in page order."""
        return tuple(
            math.prod(shape) * item_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(self.state_bytes)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included; independent of `block_size`."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded
