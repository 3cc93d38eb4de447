"""Recurrent states under vLLM 0.33 (`MambaManager`, `align`): the last snapshot, at the columns of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.config import UNLIMITED, VllmConfig
from hkv.dialects.vllm.kinds._layer import VllmLayer
from hkv.spec import LayerSpec, Mamba, RequestLimits
from hkv.spec.layer import Draw

BEYOND_KEYS, STAYS_PLANNED, LOOKED_AT, BEGUN_LOOKED_AT = 1, 2, 4, 8
"""Bits of `GroupField.EXPORT_FAILS`: defects of vLLM 0.33 that are asked for. A state beyond the keys is a
failure; one that was planned stays planned when its chunk is refused; the column of one that stands is registered, or
that of the state which its chunk began from, inside a block."""

_DEFECTS = (
    (BEYOND_KEYS, "checkpoint-beyond-keys"),
    (STAYS_PLANNED, "plan-outlives-refusal"),
    (LOOKED_AT, "checkpoint-under-later-key"),
    (BEGUN_LOOKED_AT, "begun-state-under-later-key"),
)


def parameters(config: VllmConfig, group: int, spec: Mamba, eagle: bool) -> dict[str, Any]:
    """States that are kept, each for one length; number of scratch states; states that a chunk exports."""
    del eagle
    cached = config.caching and spec.prefix_cacheable
    coarse = config.block_size(group) != config.hash_block_size
    return {
        "LOOKBACK": 1,
        "NEED": 1,
        "TAIL": 2 * cached,
        "FINE": cached and coarse and config.partial_hits,
        "PERIOD": _period(config.retention_interval, spec.block_size),
        "KEEP": 1,
        "SCRATCH": spec.num_speculative_blocks,
        "EXPORT_UNIT": config.hit_alignment,
        "EXPORT_STEP": (spec.prefill_checkpoint_alignment or 0) if spec.num_prefill_checkpoint_blocks else 0,
        "EXPORT_LAST": config.retention_interval == 0,
        "EXPORT_FAILS": sum(bit for bit, name in _DEFECTS if name in config.bugs),
    }


def _period(interval: int | None, block: int) -> int:
    """Blocks between two states that are kept; 0 if all of them are."""
    if interval is None:
        return 0
    period = interval // block if interval else UNLIMITED
    return 0 if period == 1 else period


class MambaLayer(VllmLayer):
    """`hkv.spec.Mamba` under vLLM 0.33."""

    of: ClassVar[Any] = Mamba
    vllm_name: ClassVar[str | None] = "MambaSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "shapes": "shapes",
            "page_size_padded": "page_size_padded",
            "num_speculative_blocks": "num_speculative_blocks",
            "num_prefill_checkpoint_blocks": "num_prefill_checkpoint_blocks",
            "prefill_checkpoint_alignment": "prefill_checkpoint_alignment",
            "tp_replicated": "tp_replicated",
        }
    )
    managed_fields: ClassVar[tuple[str, ...]] = (
        "num_speculative_blocks",
        "num_prefill_checkpoint_blocks",
        "prefill_checkpoint_alignment",
    )
    draw_place: ClassVar[int] = 2
    registers_parts: ClassVar[bool] = True
    event_kind: ClassVar[str | None] = "mamba"
    planned_weight: ClassVar[int] = 1
    table_alignment_tokens: ClassVar[int | None] = None

    @property
    def checkpoint_blocks(self) -> int:
        return self.spec.num_prefill_checkpoint_blocks

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        shapes = tuple((choices.pick((2, 3, 8)), choices.pick((16, 32))) for _ in range(choices.integer(1, 2)))
        drawn = cls.of(
            block_size=choices.pick((8, 16, 64)),
            shapes=shapes,
            dtypes=tuple(choices.pick(("float32", "bfloat16")) for _ in shapes),
            num_speculative_blocks=choices.pick((0, 0, 2)),
            num_prefill_checkpoint_blocks=choices.pick((0, 0, 1)),
        )
        page = drawn.page_size_bytes
        padded = choices.pick((page, page + 64, 2 * page)) if choices.chance(15) else None
        return dataclasses.replace(drawn, page_size_padded=padded)

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        return 3 if feature == "speculative_state" else 1

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """Draws fields, with states for drafts and states exported inside chunks where traffic is about them."""
        fields: dict[str, Any] = {"num_speculative_blocks": 0, "num_prefill_checkpoint_blocks": 0}
        fields["prefill_checkpoint_alignment"] = None
        if feature == "speculative_state":
            fields["num_speculative_blocks"] = choices.integer(0, 2)
            fields["num_prefill_checkpoint_blocks"] = choices.integer(0, 1)
            fields["prefill_checkpoint_alignment"] = choices.pick((2, 4, 1, None))
        return {**super().draw(choices, size, feature, ranks), **fields}

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        return 0 if aligned else 3

    @classmethod
    def draw_compared(cls, choices: Draw, size: int, ranks: int) -> LayerSpec:
        return cls.of(block_size=size)

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        return tuple(cls.of(block_size=size) for size in (1, 2))

    @property
    def checkpoint_alignment(self) -> int:
        """`prefill_checkpoint_alignment`, 1 if it is None."""
        return self.spec.prefill_checkpoint_alignment or 1

    def spanning(self, tokens: int, page_size: int | None) -> LayerSpec:
        """With snapshots so many tokens apart.

        States inside a chunk that cannot stand at any token then stand where snapshots do (vLLM 0.33
        `get_mamba_prefill_checkpoint_grid`), or where their kernel can leave them.
        """
        moves = self.spec.checkpoints_on_grid and self.checkpoint_alignment > 1
        alignment = tokens if moves else self.spec.prefill_checkpoint_alignment
        return dataclasses.replace(
            self.spec, block_size=tokens, page_size_padded=page_size, prefill_checkpoint_alignment=alignment
        )

    def max_request_blocks(self, limits: RequestLimits) -> int:
        if limits.mamba_mode == "align":
            return 2 + self.spec.num_speculative_blocks + self.spec.num_prefill_checkpoint_blocks
        return 1 + self.spec.num_speculative_blocks

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        scratch = self.spec.num_speculative_blocks
        if limits.mamba_mode == "align":
            return min(2, -(-end // self.spec.block_size)) + scratch + self.spec.num_prefill_checkpoint_blocks
        return 1 + scratch

    def row_blocks(self, limits: RequestLimits) -> int:
        """Columns by position and scratch; with one running state only, the blocks it holds (vLLM 0.33)."""
        if limits.mamba_mode == "align":
            return -(-limits.max_model_len // self.spec.block_size) + self.spec.num_speculative_blocks
        return self.max_request_blocks(limits)

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """All recurrent, with states of one size and the same scratch and checkpoint blocks."""
        names = ("num_speculative_blocks", "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment")
        return all(
            isinstance(spec, Mamba)
            and all(getattr(spec, name) == getattr(self.spec, name) for name in names)
            and spec.page_size_bytes == self.spec.page_size_bytes
            and spec.tp_replicated == self.spec.tp_replicated
            for spec in specs
        )
