"""Full attention: every query reads every earlier token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.spec.attention import AttentionSpec, all_of, same_attention
from hkv.spec.layer import Draw, LayerSpec, MergeError

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttention(AttentionSpec):
    """A full-attention layer (vLLM 0.33 `FullAttentionSpec`).

    Attributes:
      sliding_window: window of a local layer that was promoted to full caching, in tokens, or None.
      attention_chunk_size: chunk of a local layer that was promoted to full caching, in tokens, or None.
      non_causal: the layer also attends to later tokens; it changes no byte of the cache.
    """

    kind: ClassVar[str] = "full_attention"
    short_name: ClassVar[str] = "full"
    vllm_name: ClassVar[str | None] = "FullAttentionSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"sliding_window": "sliding_window", "attention_chunk_size": "attention_chunk_size", "non_causal": "non_causal"}
    )
    log_fields: ClassVar[tuple[str, ...]] = ("cp_sharded",)
    reads_all: ClassVar[bool] = True
    registers_parts: ClassVar[bool] = True
    event_kind: ClassVar[str | None] = "full_attention"
    planned_weight: ClassVar[int] = 2

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        return 2 if feature == "partial" else 1

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """Mostly shared by the ranks, where there are several."""
        return {**super().draw(choices, size, feature, ranks), "cp_sharded": ranks > 1 and choices.chance(85)}

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        return 4

    @classmethod
    def draw_compared(cls, choices: Draw, size: int, ranks: int) -> LayerSpec:
        return cls(block_size=size, cp_sharded=ranks > 1 and choices.chance(60))

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = cls.draw_geometry(choices)
        if choices.chance(20):
            fields["head_size_v"] = choices.pick((8, 16))
        if choices.chance(15):
            fields["sliding_window"] = choices.pick((32, 64))
        return cls(**fields).draw_padded(choices)

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        return tuple(cls(block_size=size) for size in (1, 2))

    def readable(self, n: int) -> range:
        return range(0, n)

    def max_request_blocks(self, limits: RequestLimits) -> int:
        length = -(-limits.max_model_len // self.shards(limits.context_parallel))
        return -(-length // self.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return -(-end // (self.block_size * self.shards(limits.context_parallel)))

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """Every layer that caches all tokens, latent or not (vLLM 0.33 registers one base for the family)."""
        return all(isinstance(spec, FullAttention) for spec in specs)

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec], bugs: frozenset[str] = frozenset()) -> LayerSpec:
        """One window and one chunk size at most, never both; everything else equal (vLLM 0.33 `merge`)."""
        all_of(specs, FullAttention)
        full = [spec for spec in specs if isinstance(spec, FullAttention)]
        if any(spec.single_vector for spec in full):
            raise MergeError("specs", specs[0], "no latent layer in a group of ordinary full attention")
        window = _only([spec.sliding_window for spec in full], "sliding_window")
        chunk = _only([spec.attention_chunk_size for spec in full], "attention_chunk_size")
        same_attention(specs)
        if window is not None and chunk is not None:
            raise MergeError("specs", (window, chunk), "a window or a chunk size in one group, not both")
        causal = not any(spec.non_causal for spec in full)
        return dataclasses.replace(
            full[0], sliding_window=window, attention_chunk_size=chunk, non_causal=not causal, is_draft=False
        )


def _only(values: list[int | None], name: str) -> int | None:
    """The one value that is not None, or None.

    Raises:
      MergeError: there are several.
    """
    found = sorted({value for value in values if value is not None})
    if len(found) > 1:
        raise MergeError(name, found, "one value for all layers of a group")
    return found[0] if found else None
