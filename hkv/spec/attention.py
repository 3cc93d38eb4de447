"""Geometry that every attention kind shares: heads, head sizes, element type, packing and padding of a page."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, ClassVar, Self

from hkv.errors import SpecError
from hkv.limits import MAX_BYTES, MAX_TOKENS, check_positive
from hkv.spec.dtypes import item_bytes
from hkv.spec.layer import LayerSpec


@dataclasses.dataclass(frozen=True)
class KernelPages:
    """Blocks lie whole kernel pages apart (vLLM 0.33 `MultipleOf` as a block stride alignment).

    Attributes:
      tokens: a kernel block has at most so many tokens: the greatest common divisor of this and the block size.
    """

    tokens: int

    def __post_init__(self) -> None:
        check_positive(self, "tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """A layer that caches a key and a value (or a latent) for each token.

    One block is `[heads, states, content]`: `num_heads` head slots, `num_states` states, `content_bytes` bytes each, K
    before V (vLLM 0.33, `AttentionSpec`). The defaults describe the smallest page, for studies of block ids alone.

    Attributes:
      cp_sharded: context parallelism splits this layer's tokens over ranks; the manager's block is then
        `block_size * ranks` tokens (vLLM `dcp_sharded`).
      num_kv_heads: key/value heads on this rank.
      head_size: elements of one key; `head_size_v`: of one value, None for the same.
      dtype: element type by name, see `hkv.spec.dtypes`.
      quantization: name of the packing that produced `num_head_slots` and `state_content_bytes`, or "none".
      page_size_padded: bytes a page takes up when padded, or None.
      num_head_slots: head slots of a page when they differ from `num_kv_heads`, or None.
      state_content_bytes: bytes of one (head, state) when `head_size` and `dtype` do not give them, or None.
      tokens_per_state: tokens that share one state; a fraction 1/k gives k states a token.
      block_stride_alignment: bytes to which the distance between blocks is rounded up, a number of kernel pages, or
        None.
      max_tp_shards: distinct shards into which tensor parallelism can split this cache; ranks beyond hold replicas.
        None: unknown, counted as not replicated.
    """

    single_vector: ClassVar[bool] = False
    """True where one latent a token takes the place of a key and a value."""

    cp_sharded: bool = False
    num_kv_heads: int = 1
    head_size: int = 1
    head_size_v: int | None = None
    dtype: str = "bfloat16"
    quantization: str = "none"
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1
    block_stride_alignment: int | KernelPages | None = None
    max_tp_shards: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_kv_heads", "head_size")
        item_bytes(self.dtype)
        for name in ("num_head_slots", "state_content_bytes", "max_tp_shards", "page_size_padded"):
            if getattr(self, name) is not None:
                check_positive(self, name, most=MAX_BYTES)
        if self.block_stride_alignment is not None and not isinstance(self.block_stride_alignment, KernelPages):
            check_positive(self, "block_stride_alignment", most=MAX_BYTES)
        self._check_kernel_pages()
        if not Fraction(1, MAX_TOKENS) <= self.tokens_per_state <= MAX_TOKENS:
            raise SpecError(
                "tokens_per_state", self.tokens_per_state, f"a positive number of tokens, at most {MAX_TOKENS}"
            )
        if self.page_size_padded is not None and self.page_size_padded < self.unpadded_page_size_bytes:
            expected = f"at least the page's {self.unpadded_page_size_bytes} bytes"
            raise SpecError("page_size_padded", self.page_size_padded, expected)

    def _check_kernel_pages(self) -> None:
        alignment = self.block_stride_alignment
        if isinstance(alignment, KernelPages) and self.tokens_per_state > math.gcd(alignment.tokens, self.block_size):
            expected = f"kernel pages that hold a state of {self.tokens_per_state} tokens"
            raise SpecError("block_stride_alignment", alignment, expected)

    @property
    def shared_by_ranks(self) -> bool:
        """True if context parallelism splits this layer's tokens over ranks."""
        return self.cp_sharded

    @property
    def value_size(self) -> int:
        """Elements of one value; 0 for kinds that cache a latent only."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def num_heads(self) -> int:
        """Head slots in one page (the H axis)."""
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def num_states(self) -> int:
        """States in one block (the N axis)."""
        return self.states_in(self.block_size)

    @property
    def content_bytes(self) -> int:
        """Bytes of one (head, state) cell (the C axis)."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + self.value_size) * item_bytes(self.dtype)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of one layer that carry data."""
        return self.num_heads * self.num_states * self.content_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    def states_in(self, tokens: int) -> int:
        """States that a block of `tokens` tokens holds."""
        return int(tokens // self.tokens_per_state)

    @property
    def stride_alignment_bytes(self) -> int:
        """Bytes of which the distance between two blocks is a multiple (vLLM 0.33 `get_block_stride_alignment`)."""
        alignment = self.block_stride_alignment
        if alignment is None:
            return 1
        if isinstance(alignment, int):
            return alignment
        kernel_tokens = math.gcd(alignment.tokens, self.block_size)
        return 1 if kernel_tokens == self.block_size else self.page_bytes_of(kernel_tokens)

    def page_bytes_of(self, tokens: int) -> int:
        """Bytes of a page cut down to `tokens` tokens; a padded page is never cut."""
        if self.page_size_padded is not None:
            return self.page_size_padded
        return self.num_heads * self.states_in(tokens) * self.content_bytes

    def bytes_of(self, tokens: int) -> int:
        """Bytes of so many tokens, wherever blocks end."""
        return int(Fraction(tokens * self.num_heads * self.content_bytes) / self.tokens_per_state)

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block, its padding in proportion."""
        padded = self.page_size_padded
        if padded is not None:
            padded = -(-padded * block_size // self.block_size)
        return dataclasses.replace(self, block_size=block_size, page_size_padded=padded)

    def full_fields(self, block_size: int) -> dict[str, Any]:
        """The fields of this class for a full-attention layer of the same geometry, its page as large in proportion."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(AttentionSpec)}
        fields["block_size"] = block_size
        if self.page_size_padded is not None:
            unpadded = self.unpadded_page_size_bytes * block_size // self.block_size
            fields["page_size_padded"] = max(self.page_size_padded, unpadded)
        return fields

    def shards(self, context_parallel: int) -> int:
        """Ranks that split this layer's tokens among them."""
        return context_parallel if self.cp_sharded else 1


def attention_of(spec: LayerSpec) -> AttentionSpec | None:
    """The layer with the geometry that all attention has, where it has that; else None."""
    return spec if isinstance(spec, AttentionSpec) else None


def caches_latents(spec: LayerSpec) -> bool:
    """True if one latent a token takes the place of a key and a value."""
    attention = attention_of(spec)
    return attention is not None and attention.single_vector


def is_latent(spec: LayerSpec) -> bool:
    """True if every query reads all earlier tokens' latents."""
    return caches_latents(spec) and spec.reads_all


def bounded_bytes(spec: LayerSpec, tokens: int) -> int:
    """Bytes that a sequence of so many tokens holds besides those that each token adds for good.

    Blocks are not counted whole: a window has its own tokens, and no more than the sequence; a chunk its longest; cross
    attention those of the encoder, however long the request is.
    """
    attention = attention_of(spec)
    if attention is None:
        return spec.unpadded_page_size_bytes
    return attention.bytes_of(spec.encoder_tokens or min(spec.most_read, tokens))
