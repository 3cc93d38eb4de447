"""Full attention: every query reads every earlier token's key and value, or its latent, or an encoder's output."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullAttention(AttentionSpec):
    """A full-attention layer (vLLM 0.33 `FullAttentionSpec`).

    Attributes:
      sliding_window: window of a local layer that was promoted to full caching, in tokens, or None.
      attention_chunk_size: chunk of a local layer that was promoted to full caching, in tokens, or None.
      non_causal: the layer also attends to later tokens; it changes no byte of the cache.
    """

    kind: ClassVar[str] = "full_attention"
    written: ClassVar[Written] = Written("full", (), ("cp_sharded",))
    reads_all: ClassVar[bool] = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    def readable(self, n: int) -> range:
        return range(0, n)


# Multi-head latent attention: one compressed latent a token, read by every later query.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Layer that caches one latent a token in the place of a key and a value, in pages that may be aligned.

    Attributes:
      alignment: bytes to which the page is rounded up, or None; larger padding stands.
    """

    single_vector: ClassVar[bool] = True
    head_size_v: int | None = 0
    alignment: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size_padded", self._aligned(self.page_size_padded))
        super().__post_init__()

    def _aligned(self, padded: int | None) -> int | None:
        """`page_size_padded` of a page that is rounded up; larger padding stands, None where none is due."""
        if self.alignment is None or self.alignment < 1:
            return padded
        page = self.unpadded_page_size_bytes
        rounded = -(-page // self.alignment) * self.alignment
        return max(rounded, padded or 0) if rounded != page else padded

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAAttention(LatentSpec, FullAttention):
    """A multi-head latent attention layer, or its sparse indexer (vLLM 0.33 `MLAAttentionSpec`).

    `head_size` counts the latent and the rotary part together; there is no separate value.

    Attributes:
      cache_dtype: the packing's name as the engine knows it, e.g. `fp8_ds_mla`, or None.
      cache_role: `sparse`, `indexer`, or None for the ordinary latent.
      model_version: variant of the packing, e.g. `deepseek_v4`, or None.
      topk_buffer_width: width of the model's buffer of sparse indices, or None; layers of one group share it.
      is_index_group_leader: the layer computes the sparse indices that others reuse.
      non_causal_multi_token_decode: the layer decodes blocks of non-causal queries; it changes no byte.
    """

    kind: ClassVar[str] = "mla"
    written: ClassVar[Written] = dataclasses.replace(FullAttention.written, short_name="mla")
    cache_dtype: str | None = None
    cache_role: str | None = None
    model_version: str | None = None
    topk_buffer_width: int | None = None
    is_index_group_leader: bool = False
    non_causal_multi_token_decode: bool = False


# Hidden states kept next to the cache, so that a connector can hand them out.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenState(MLAAttention):
    """A layer that stores one hidden state a token (vLLM 0.33 `HiddenStateCacheSpec`).

    Managed like a latent layer, hence of the same `kind`; grouping keeps it in a group of its own.
    """


# Cross attention: an encoder's output, whose keys and values are computed once for a request.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttention(AttentionSpec):
    """A decoder's layer that reads an encoder's output (vLLM 0.33 `CrossAttentionSpec`).

    Its blocks hold the encoder's tokens, none of the request's own: they are all taken when the request is admitted,
    and stay until its end. None is ever shared, and vLLM 0.33 caches no prefix of a model that has such layers, though
    their spec does not say so (`prefix_cacheable`), and counts when it chooses the tokens between two hashes.

    Attributes:
      encoder_len: tokens of an encoder's output that one request comes with at most.
    """

    kind: ClassVar[str] = "cross_attention"
    written: ClassVar[Written] = Written("cross", ("encoder_len",))
    encoder_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "encoder_len")

    def readable(self, n: int) -> range:
        """No token of the request itself."""
        del n
        return range(0)

    @property
    def encoder_tokens(self) -> int:
        """`encoder_len`."""
        return self.encoder_len
