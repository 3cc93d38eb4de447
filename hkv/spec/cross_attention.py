"""Cross attention: every query reads an encoder's output, whose keys and values are computed once for a request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.limits import check_positive
from hkv.spec.attention import AttentionSpec
from hkv.spec.layer import Draw, LayerSpec

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits


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
    short_name: ClassVar[str] = "cross"
    parameters: ClassVar[tuple[str, ...]] = ("encoder_len",)
    vllm_name: ClassVar[str | None] = "CrossAttentionSpec"
    event_kind: ClassVar[str | None] = "cross_attention"
    reads_encoder: ClassVar[bool] = True
    log_fields: ClassVar[tuple[str, ...]] = ("encoder_len",)
    log_version: ClassVar[int] = 3
    joins_latent: ClassVar[bool] = False
    planned_weight: ClassVar[int] = 1

    encoder_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "encoder_len")

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        return {"kind": cls.kind, "block_size": size, "encoder_len": choices.pick((1, 6, 30))}

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        return cls(**cls.draw_geometry(choices), encoder_len=choices.pick((1, 16, 100))).draw_padded(choices)

    def readable(self, n: int) -> range:
        """No token of the request itself."""
        del n
        return range(0)

    @property
    def encoder_tokens(self) -> int:
        """`encoder_len`."""
        return self.encoder_len

    def bounded_bytes(self, tokens: int) -> int:
        """Those of the encoder's tokens, whatever the length of the request."""
        del tokens
        return self.bytes_of(self.encoder_len)

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """As many as an encoder's input of a whole step fills, whatever the model's encoder makes of one request."""
        return -(-limits.max_num_encoder_input_tokens // self.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        del start, end
        return -(-min(self.encoder_len, limits.max_num_encoder_input_tokens) // self.block_size)

    def row_blocks(self, limits: RequestLimits) -> int:
        longest = max(limits.max_model_len, limits.max_num_encoder_input_tokens, self.encoder_len)
        return -(-longest // (self.block_size * self.shards(limits.context_parallel)))
