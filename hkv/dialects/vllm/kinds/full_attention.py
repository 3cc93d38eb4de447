"""Full attention under vLLM 0.33 (`FullAttentionManager`): every block counts, from the first on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer, all_of, same_attention
from hkv.spec import FullAttention, LayerSpec, MergeError, RequestLimits
from hkv.spec.layer import Draw


def parameters(config: VllmConfig, group: int, spec: LayerSpec, eagle: bool) -> dict[str, Any]:
    """Registration of the prompt's tail, where a manager block is several hash blocks; hits may then end inside one.

    Such a hit waits for the next step if its block is not written yet (defect copied-before-written).
    """
    del spec, eagle
    coarse = config.caching and config.block_size(group) != config.hash_block_size
    fine = coarse and config.partial_hits
    return {"TAIL": coarse, "FINE": fine, "WAITS": fine and "copied-before-written" not in config.bugs}


class FullAttentionLayer(AttentionLayer):
    """`hkv.spec.FullAttention` under vLLM 0.33."""

    of: ClassVar[Any] = FullAttention
    vllm_name: ClassVar[str | None] = "FullAttentionSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"sliding_window": "sliding_window", "attention_chunk_size": "attention_chunk_size", "non_causal": "non_causal"}
    )
    registers_parts: ClassVar[bool] = True
    event_kind: ClassVar[str | None] = "full_attention"
    planned_weight: ClassVar[int] = 2

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
        return cls.of(block_size=size, cp_sharded=ranks > 1 and choices.chance(60))

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        fields = cls.draw_geometry(choices)
        if choices.chance(20):
            fields["head_size_v"] = choices.pick((8, 16))
        if choices.chance(15):
            fields["sliding_window"] = choices.pick((32, 64))
        return cls.draw_padded(choices, cls.of(**fields))

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        return tuple(cls.of(block_size=size) for size in (1, 2))

    def max_request_blocks(self, limits: RequestLimits) -> int:
        length = -(-limits.max_model_len // self.spec.shards(limits.context_parallel))
        return -(-length // self.spec.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        return -(-end // (self.spec.block_size * self.spec.shards(limits.context_parallel)))

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
