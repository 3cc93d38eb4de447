"""Cross attention: every query reads an encoder's output, whose keys and values are computed once for a request."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Written


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
