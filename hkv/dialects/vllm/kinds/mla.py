"""Multi-head latent attention under vLLM 0.33: managed as full attention (`FullAttentionManager`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hkv.dialects.vllm.kinds._attention import all_of, same_attention, unique
from hkv.dialects.vllm.kinds.full_attention import FullAttentionLayer, parameters
from hkv.spec import HiddenState, KernelPages, LayerSpec, MLAAttention
from hkv.spec.dtypes import item_bytes
from hkv.spec.layer import Draw

__all__ = ["parameters"]


class MlaLayer(FullAttentionLayer):
    """`hkv.spec.MLAAttention` under vLLM 0.33."""

    of: ClassVar[Any] = MLAAttention
    vllm_name: ClassVar[str | None] = "MLAAttentionSpec"
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "sliding_window": "sliding_window",
            "attention_chunk_size": "attention_chunk_size",
            "non_causal": "non_causal",
            "cache_dtype_str": "cache_dtype",
            "topk_buffer_width": "topk_buffer_width",
            "alignment": "alignment",
            "model_version": "model_version",
            "cache_role": "cache_role",
            "is_index_group_leader": "is_index_group_leader",
            "non_causal_multi_token_decode": "non_causal_multi_token_decode",
        }
    )
    draw_place: ClassVar[int] = 3
    log_version: ClassVar[int] = 2
    event_kind: ClassVar[str | None] = "mla_attention"
    planned_weight: ClassVar[int] = 2

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        return int(version >= cls.log_version)

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        role = choices.pick((None, None, None, "indexer"))
        return cls.of(**draw_latent(cls.draw_geometry(choices), choices), cache_role=role)

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        """0: hits are found as those of full attention are."""
        return 0

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """None, for the same reason."""
        return ()

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec], bugs: frozenset[str] = frozenset()) -> LayerSpec:
        """One packing, compression, role and geometry; windows and alignment are dropped (vLLM 0.33 `merge`)."""
        all_of(specs, MLAAttention)
        unique(specs, "cache_dtype", "topk_buffer_width", "tokens_per_state", "model_version", "cache_role")
        unique(specs, "is_index_group_leader", "block_stride_alignment")
        same_attention(specs)
        latent = [spec for spec in specs if isinstance(spec, MLAAttention)]
        return dataclasses.replace(
            latent[0],
            alignment=None,
            sliding_window=None,
            attention_chunk_size=None,
            non_causal=False,
            non_causal_multi_token_decode=any(spec.non_causal_multi_token_decode for spec in latent),
            is_draft=False,
        )


class HiddenStateLayer(MlaLayer):
    """`hkv.spec.HiddenState` under vLLM 0.33."""

    of: ClassVar[Any] = HiddenState
    stands_alone: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False
    planned_weight: ClassVar[int] = 1
    vllm_name: ClassVar[str | None] = "HiddenStateCacheSpec"

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        return cls.of(block_size=choices.pick((8, 16)), num_kv_heads=1, head_size=choices.pick((64, 512, 4096)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's hidden state."""
        return self.spec.num_kv_heads * self.spec.head_size * item_bytes(self.spec.dtype)


def draw_latent(fields: dict[str, Any], choices: Draw) -> dict[str, Any]:
    """Random fields of a layer of latents to plan for.

    Args:
      fields: those of any attention layer.
      choices: source of decisions.
    """
    fields = {**fields, "num_kv_heads": 1}
    if choices.chance(40):
        fields["alignment"] = choices.pick((64, 512, 576))
    if not isinstance(fields.get("block_stride_alignment"), KernelPages):
        fields["tokens_per_state"] = choices.pick((1, 1, 2, 4))
    return fields
