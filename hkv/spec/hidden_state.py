"""Hidden states kept beside the cache, so that a connector can hand them out."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hkv.spec.dtypes import item_bytes
from hkv.spec.layer import Draw, LayerSpec
from hkv.spec.mla import MLAAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenState(MLAAttention):
    """A layer that stores one hidden state a token (vLLM 0.33 `HiddenStateCacheSpec`).

    Managed like a latent layer, hence of the same `kind`; grouping keeps it in a group of its own.
    """

    stands_alone: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False
    planned_weight: ClassVar[int] = 1
    vllm_name: ClassVar[str | None] = "HiddenStateCacheSpec"

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        return cls(block_size=choices.pick((8, 16)), num_kv_heads=1, head_size=choices.pick((64, 512, 4096)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's hidden state."""
        return self.num_kv_heads * self.head_size * item_bytes(self.dtype)
