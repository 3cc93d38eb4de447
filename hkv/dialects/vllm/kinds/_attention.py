"""Every attention layer under vLLM 0.33: element, replicas, columns, how such layers share a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.dialects.vllm.kinds._layer import VllmLayer
from hkv.spec import AttentionSpec, KernelPages, LayerSpec, MergeError
from hkv.spec.layer import Draw

if TYPE_CHECKING:
    from hkv.spec import RequestLimits


class AttentionLayer(VllmLayer):
    """A layer that caches a key and a value, or a latent, for each token."""

    of: ClassVar[Any] = AttentionSpec

    @classmethod
    def draw_geometry(cls, choices: Draw) -> dict[str, Any]:
        """Random fields of this class for a layer to plan for.

        Args:
          choices: source of decisions.
        """
        fields: dict[str, Any] = {
            "block_size": choices.pick((4, 8, 16, 16, 32)),
            "num_kv_heads": choices.pick((1, 1, 2, 4)),
            "head_size": choices.pick((8, 16, 16, 24, 32)),
            "dtype": choices.pick(("bfloat16", "bfloat16", "float32", "uint8")),
            "cp_sharded": choices.chance(50),
            "max_tp_shards": choices.pick((None, None, 1, 4)),
        }
        if choices.chance(15):
            fields["block_stride_alignment"] = choices.pick((64, 100, 512, KernelPages(8), KernelPages(6)))
        if choices.chance(15):
            fields["quantization"] = choices.pick(("fp8_per_tensor", "int8_per_token_head"))
        if choices.chance(15):
            fields["state_content_bytes"] = choices.pick((36, 64, 72))
        return fields

    @classmethod
    def draw_padded(cls, choices: Draw, spec: AttentionSpec) -> LayerSpec:
        """A layer, or the same of a larger page.

        Args:
          choices: source of decisions.
          spec: the layer.
        """
        if not choices.chance(15):
            return spec
        page = spec.page_size_bytes
        return dataclasses.replace(spec, page_size_padded=choices.pick((page, page + 64, 2 * page)))

    def draw_near(self, choices: Draw) -> LayerSpec:
        name = choices.pick(("block_size", "num_kv_heads", "head_size"))
        return dataclasses.replace(self.spec, **{name: 2 * getattr(self.spec, name), "page_size_padded": None})

    @property
    def element(self) -> tuple[str, str] | None:
        return self.spec.dtype, self.spec.quantization

    def replicas(self, ranks: int, context_parallel: int) -> int:
        """As many as there are ranks for each of `max_tp_shards`, where tokens are not split (vLLM 0.33)."""
        if self.spec.max_tp_shards is None or self.spec.shards(context_parallel) > 1:
            return 1
        return max(1, ranks // self.spec.max_tp_shards)

    def row_blocks(self, limits: RequestLimits) -> int:
        """Columns of a block table that one request can use; under context parallelism each stands for more tokens."""
        return -(-limits.max_model_len // (self.spec.block_size * self.spec.shards(limits.context_parallel)))


ATTENTION_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionSpec) if field.compare)
"""The fields that all attention layers of a group must agree on."""


def unique(specs: Sequence[LayerSpec], *names: str) -> None:
    """Raise MergeError unless each named attribute is the same in all of `specs`."""
    for name in names:
        values = {getattr(spec, name) for spec in specs}
        if len(values) > 1:
            raise MergeError(name, sorted(map(str, values)), "one value for all layers of a group")


def same_attention(specs: Sequence[LayerSpec]) -> None:
    """Raise MergeError unless all of `specs` have the same geometry, element type, packing and sharding."""
    unique(specs, *(name for name in ATTENTION_FIELDS if name != "head_size_v"), "value_size")


def all_of(specs: Sequence[LayerSpec], kind: type[LayerSpec]) -> None:
    """Raise MergeError unless all of `specs` are of `kind`."""
    for spec in specs:
        if not isinstance(spec, kind):
            raise MergeError("specs", spec, f"{kind.__name__} layers only in this group")
