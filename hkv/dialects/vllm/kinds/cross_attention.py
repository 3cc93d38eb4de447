"""Cross attention under vLLM 0.33 (`CrossAttentionManager`): blocks of an encoder's output, none of the request's."""

from __future__ import annotations

from typing import Any, ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer
from hkv.spec import CrossAttention, LayerSpec, RequestLimits
from hkv.spec.layer import Draw


def parameters(config: VllmConfig, group: int, spec: CrossAttention, eagle: bool) -> dict[str, Any]:
    """No field besides those that follow from the spec: the encoder's tokens come with each operation."""
    del config, group, spec, eagle
    return {}


class CrossAttentionLayer(AttentionLayer):
    """`hkv.spec.CrossAttention` under vLLM 0.33."""

    of: ClassVar[Any] = CrossAttention
    vllm_name: ClassVar[str | None] = "CrossAttentionSpec"
    event_kind: ClassVar[str | None] = "cross_attention"
    log_version: ClassVar[int] = 3
    reads_encoder: ClassVar[bool] = True
    joins_latent: ClassVar[bool] = False
    planned_weight: ClassVar[int] = 1

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        return {"kind": cls.of.kind, "block_size": size, "encoder_len": choices.pick((1, 6, 30))}

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        return cls.draw_padded(choices, cls.of(**cls.draw_geometry(choices), encoder_len=choices.pick((1, 16, 100))))

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """As many as an encoder's input of a whole step fills, whatever the model's encoder makes of one request."""
        return -(-limits.max_num_encoder_input_tokens // self.spec.block_size)

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        del start, end
        return -(-min(self.spec.encoder_len, limits.max_num_encoder_input_tokens) // self.spec.block_size)

    def row_blocks(self, limits: RequestLimits) -> int:
        longest = max(limits.max_model_len, limits.max_num_encoder_input_tokens, self.spec.encoder_len)
        return -(-longest // (self.spec.block_size * self.spec.shards(limits.context_parallel)))
