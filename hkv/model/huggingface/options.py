"""Settings with which a model is served, as far as the bytes of its layers depend on them."""

from __future__ import annotations

import dataclasses

from hkv.errors import ConfigError
from hkv.limits import MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole
from hkv.spec.dtypes import ITEM_BYTES

KV_DTYPES = (
    *("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "nvfp4", "nvfp4_4over6"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
    *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_ds_mla", "nvfp4_ds_mla"),
)
"""Element types and packings that a cache can be asked for by name."""


GDN_PREFILLS = ("flashinfer", "triton")
"""Kernels for prompts of gated delta nets. FlashInfer's, which vLLM 0.33 takes on Hopper and with CUDA 13 on Blackwell,
leaves a state behind inside a chunk."""

KDA_PREFILLS = ("flashkda", "triton")
"""Kernels for prompts of Kimi delta attention with bounded gates. FlashKDA's, which vLLM 0.33 takes on Hopper and
Blackwell, leaves a state behind inside a chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Settings with which a model is served, each as `hkv.read_model` has it.

    `kda_prefill` is one of `KDA_PREFILLS`, for Kimi K3, as `gdn_prefill` is for Qwen3-Next and Qwen3.5.
    """

    block_size: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    dtype: str | None = None
    kv_dtype: str = "auto"
    state_dtype: str | None = None
    speculative_tokens: int = 0
    gdn_prefill: str = GDN_PREFILLS[0]
    kda_prefill: str = KDA_PREFILLS[0]
    draft: bool = False
    ignore_fields: tuple[str, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        choices = {"kv_dtype": KV_DTYPES, "gdn_prefill": GDN_PREFILLS, "kda_prefill": KDA_PREFILLS}
        for name, known in {**choices, "dtype": ITEM_BYTES, "state_dtype": ITEM_BYTES}.items():
            value = getattr(self, name)
            if value not in known and (name in choices or value is not None):
                raise ConfigError(name, value, f"one of {', '.join(known)}")
        for name in ("tensor_parallel", "context_parallel"):
            check_whole(name, getattr(self, name), 1, MAX_RANKS)
        check_whole("speculative_tokens", self.speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        if self.block_size is not None:
            check_whole("block_size", self.block_size, 1, MAX_TOKENS)
