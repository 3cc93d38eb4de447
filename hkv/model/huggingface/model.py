"""A model's decoder layers, what each caches, and which field of its config says so."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from fractions import Fraction

from hkv.errors import ConfigError, PlanError
from hkv.limits import MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole
from hkv.spec import AttentionSpec, LayerSpec, attention_of, bounded_bytes
from hkv.spec.dtypes import ITEM_BYTES


@dataclasses.dataclass(frozen=True)
class CacheLayer:
    """One cache of one decoder layer, `layers.3` or, of several, `layers.3.indexer`; no spec where it shares another's.

    `fields` are those of the config by what they decide: `kind`, `heads`, `size`, `window`, `state`, `dtype`.
    `full_token_bytes` is what a token would cost here if the layer were full attention.
    """

    name: str
    index: int
    spec: LayerSpec | None
    fields: Mapping[str, tuple[str, ...]]
    shares: str | None = None
    full_token_bytes: int = 0

    @property
    def governed_by(self) -> frozenset[str]:
        """Every field of the config on which this layer's cache depends."""
        return frozenset(name for names in self.fields.values() for name in names)

    @property
    def token_bytes(self) -> Fraction:
        """Bytes that one more token adds for good; 0 for windows and states, whose size is bounded."""
        spec = self.spec
        if spec is None or not spec.reads_all:
            return Fraction(0)
        return Fraction(spec.unpadded_page_size_bytes, spec.block_size)


@dataclasses.dataclass(frozen=True)
class Model:
    """Caches of a model on one tensor-parallel rank, in the order in which the engine lists them.

    Attributes:
      layouts: physical orders that the model's kernels accept, best first, or None for all.
      latent_sizes: elements of a latent and of its rotary key where there are any, or None.
      indexer_size: elements of a sparse indexer's key, scales not counted, or None.
      least_step_tokens: tokens of the largest image or video that has to be computed in one step, or 0.
      notes: a line for each value that is not in the file and has the library's default.
    """

    model_type: str
    layers: tuple[CacheLayer, ...]
    num_layers: int
    max_model_len: int
    layouts: tuple[str, ...] | None = None
    tensor_parallel: int = 1
    latent_sizes: tuple[int, int] | None = None
    indexer_size: int | None = None
    least_step_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def specs(self) -> dict[str, LayerSpec]:
        """Cache descriptions by the layers' names."""
        return {layer.name: layer.spec for layer in self.layers if layer.spec is not None}

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """Descriptions of the layers that keep keys, in the layers' order."""
        return [spec for spec in map(attention_of, self.specs.values()) if spec is not None]

    @property
    def encoder_tokens(self) -> int:
        """Tokens of an encoder's output that one request comes with at most; 0 of a model without an encoder."""
        return max((spec.encoder_tokens for spec in self.specs.values()), default=0)

    @property
    def token_bytes(self) -> Fraction:
        """Bytes that one more token adds for good, all layers together."""
        return sum((layer.token_bytes for layer in self.layers), Fraction(0))

    @property
    def full_token_bytes(self) -> int:
        """Bytes a token would cost if every layer were full attention with a cache of its own."""
        return sum(layer.full_token_bytes for layer in self.layers)

    @property
    def resident_bytes(self) -> int:
        """Bytes of windows, chunks and states that one long sequence holds.

        A window counts its tokens, without rounding to blocks; a chunk its longest.
        """
        return sum(bounded_bytes(spec, MAX_TOKENS) for spec in self.specs.values())

    def stage_specs(self, stages: int) -> list[dict[str, LayerSpec]]:
        """Each pipeline stage's layers; those left over go to the middle stages."""
        result = []
        for first, end in stage_bounds(self.num_layers, stages):
            owned = {layer.name: layer.spec for layer in self.layers if first <= layer.index < end}
            result.append({name: spec for name, spec in owned.items() if spec is not None})
        return result


def stage_bounds(layers: int, stages: int) -> list[tuple[int, int]]:
    """Each pipeline stage's first layer, and the one after its last (vLLM 0.33 `get_pp_indices`)."""
    if not 1 <= stages <= layers:
        raise PlanError("pipeline_parallel", stages, f"1 to {layers}, the number of layers")
    counts = [layers // stages] * stages
    for extra in range(layers % stages):
        counts[-(extra + 2)] += 1
    ends = list(itertools.accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))


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
