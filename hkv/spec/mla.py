"""Multi-head latent attention: one compressed latent a token, read by every later query."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

from hkv.spec.attention import KernelPages, all_of, same_attention, unique
from hkv.spec.full_attention import FullAttention
from hkv.spec.layer import Draw, LayerSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAAttention(FullAttention):
    """A multi-head latent attention layer, or its sparse indexer (vLLM 0.33 `MLAAttentionSpec`).

    `head_size` counts the latent and the rotary part together; there is no separate value.

    Attributes:
      cache_dtype: the packing's name as the engine knows it, e.g. `fp8_ds_mla`, or None.
      cache_role: `sparse`, `indexer`, or None for the ordinary latent.
      alignment: bytes to which the page is rounded up, or None; larger padding stands.
      model_version: variant of the packing, e.g. `deepseek_v4`, or None.
      topk_buffer_width: width of the model's buffer of sparse indices, or None; layers of one group share it.
      is_index_group_leader: the layer computes the sparse indices that others reuse.
      non_causal_multi_token_decode: the layer decodes blocks of non-causal queries; it changes no byte.
    """

    kind: ClassVar[str] = "mla"
    short_name: ClassVar[str] = "mla"
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
    single_vector: ClassVar[bool] = True
    planned_weight: ClassVar[int] = 2

    head_size_v: int | None = 0
    cache_dtype: str | None = None
    cache_role: str | None = None
    alignment: int | None = None
    model_version: str | None = None
    topk_buffer_width: int | None = None
    is_index_group_leader: bool = False
    non_causal_multi_token_decode: bool = False

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        return int(version >= cls.log_version)

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        role = choices.pick((None, None, None, "indexer"))
        return cls(**draw_latent(cls.draw_geometry(choices), choices), cache_role=role)

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        """0: hits are found as those of full attention are."""
        return 0

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """None, for the same reason."""
        return ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size_padded", aligned_page(self, self.alignment, self.page_size_padded))
        super().__post_init__()

    def page_bytes_of(self, tokens: int) -> int:
        """Bytes of a page cut down to `tokens` tokens, aligned like the whole one."""
        page = self.num_heads * self.states_in(tokens) * self.content_bytes
        if self.alignment is not None and page % self.alignment:
            return -(-page // self.alignment) * self.alignment
        return page if self.page_size_padded is None else self.page_size_padded

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block, aligned anew."""
        if self.alignment is None:
            return super().with_block_size(block_size)
        return dataclasses.replace(self, block_size=block_size, page_size_padded=None)

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


def aligned_page(spec: LayerSpec, alignment: int | None, padded: int | None) -> int | None:
    """`page_size_padded` of a page rounded up to `alignment` bytes; larger padding stands, None where none is due."""
    if alignment is None or alignment < 1:
        return padded
    page = spec.unpadded_page_size_bytes
    rounded = -(-page // alignment) * alignment
    return max(rounded, padded or 0) if rounded != page else padded
