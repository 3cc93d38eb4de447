"""How a model is served, as far as the bytes of its layers depend on it."""

from __future__ import annotations

import dataclasses

from hkv.errors import ConfigError
from hkv.spec.dtypes import ITEM_BYTES

KV_DTYPES = (
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
)
"""Element types and packings that a cache can be asked for by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a model is served.

    Attributes:
      block_size: tokens per block, or None for what the model's kernels want.
      tensor_parallel: ranks that split the heads.
      context_parallel: ranks that split the tokens of full-attention layers; windows and states are replicated.
      dtype: the model's element type, or None for what its config says.
      kv_dtype: one of `KV_DTYPES`; `auto` stores what the model computes with.
      state_dtype: element type of recurrent states, or None for what the model says.
      speculative_tokens: draft tokens verified in one step; recurrent states keep scratch for them.
      draft: the layers belong to a draft module.
    """

    block_size: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    dtype: str | None = None
    kv_dtype: str = "auto"
    state_dtype: str | None = None
    speculative_tokens: int = 0
    draft: bool = False

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError("kv_dtype", self.kv_dtype, f"one of {', '.join(KV_DTYPES)}")
        for name in ("dtype", "state_dtype"):
            value = getattr(self, name)
            if value is not None and value not in ITEM_BYTES:
                raise ConfigError(name, value, f"one of {', '.join(ITEM_BYTES)}")
        for name, least in (("tensor_parallel", 1), ("context_parallel", 1), ("speculative_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(name, value, f"an integer of at least {least}")
        if self.block_size is not None and (type(self.block_size) is not int or self.block_size < 1):
            raise ConfigError("block_size", self.block_size, "a positive integer")
