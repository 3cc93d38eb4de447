"""Multi-head latent attention: one compressed latent a token, read by every later query."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from hkv.spec.full_attention import FullAttention
from hkv.spec.layer import LayerSpec, Written


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
    written: ClassVar[Written] = Written("mla", (), ("cp_sharded",))
    single_vector: ClassVar[bool] = True
    head_size_v: int | None = 0
    cache_dtype: str | None = None
    cache_role: str | None = None
    alignment: int | None = None
    model_version: str | None = None
    topk_buffer_width: int | None = None
    is_index_group_leader: bool = False
    non_causal_multi_token_decode: bool = False

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


def aligned_page(spec: LayerSpec, alignment: int | None, padded: int | None) -> int | None:
    """`page_size_padded` of a page rounded up to `alignment` bytes; larger padding stands, None where none is due."""
    if alignment is None or alignment < 1:
        return padded
    page = spec.unpadded_page_size_bytes
    rounded = -(-page // alignment) * alignment
    return max(rounded, padded or 0) if rounded != page else padded


# Hidden states kept beside the cache, so that a connector can hand them out.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenState(MLAAttention):
    """A layer that stores one hidden state a token (vLLM 0.33 `HiddenStateCacheSpec`).

    Managed like a latent layer, hence of the same `kind`; grouping keeps it in a group of its own.
    """
