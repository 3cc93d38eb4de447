"""Weights of what vLLM 0.33 loads around a decoder: encoders of images and sound, and projections from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hkv.dialects.vllm.weights.rank import Rank, unknown

Tower = Callable[[Rank], int]

CLIP: Mapping[str, Any] = {"attention": "self_attn.qkv_proj", "out": "self_attn.out_proj"}
"""Names in layers of CLIP's and SigLIP's encoders."""

QWEN: Mapping[str, Any] = {"depth": "depth", "heads": "num_heads"}
"""Fields of Qwen's encoders and those made like them."""

GATED: Mapping[str, Any] = {"gated": True, "mlp": ("mlp.gate_up_proj", "mlp.down_proj")}
"""An MLP with a gate in such a layer."""


def blocks(
    rank: Rank,
    name: str,
    inner: int,
    *,
    norms: int,
    attention: str = "attn.qkv",
    out: str = "attn.proj",
    gated: bool = False,
    bias: bool = True,
    attention_bias: bool | None = None,
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2"),
    heads: str = "num_attention_heads",
    extra: int = 0,
) -> int:
    """One layer of a vision transformer, with `extra` bytes beside.

    `mlp` names the projections up and down, `heads` the field of their number. The MLP, and attention unless it says
    otherwise, have biases.
    """
    size = rank.hidden
    count = rank.number(heads)
    shared = rank.number("num_key_value_heads", default=count)
    head = rank.number("head_dim", default=size // count)
    biased = bias if attention_bias is None else attention_bias
    parts = (rank.share(count, "heads of the encoder") * head, *[rank.heads(shared) * head] * 2)
    total = rank.linear(f"{name}.{attention}", size, parts, "column", biased)
    total += rank.row(f"{name}.{out}", count * head, size, biased)
    total += rank.column(f"{name}.{mlp[0]}", size, *[inner] * (1 + gated), bias=bias)
    return total + rank.row(f"{name}.{mlp[1]}", inner, size, bias) + rank.vector(*[size] * norms) + extra


def encoder(rank: Rank, name: str, inner: int, *, depth: str = "num_hidden_layers", **shape: Any) -> int:
    """All layers of a vision transformer."""
    return sum(blocks(rank, f"{name}.{index}", inner, **shape) for index in range(rank.number(depth)))


def siglip(rank: Rank, name: str) -> int:
    """SigLIP without its pooling head: patches, positions, layers and the norm after them."""
    size, patch = rank.hidden, rank.number("patch_size")
    total = rank.vector(size * (rank.number("num_channels", default=3) * patch**2 + 1))
    total += rank.vector((rank.number("image_size") // patch) ** 2 * size) + rank.vector(size, size)
    return total + encoder(rank, f"{name}.encoder.layers", rank.number("intermediate_size"), norms=4, **CLIP)


def gemma3(rank: Rank) -> int:
    """SigLIP, and a projection with a norm."""
    vision = rank.inside("vision_config")
    total = siglip(vision, "vision_tower.vision_model")
    return total + rank.vector(vision.hidden * rank.hidden, vision.hidden)


def gemma4(rank: Rank) -> int:
    """A tower that transformers has, whole on every rank, and a projection."""
    if rank.value("audio_config") is not None:
        raise unknown("audio_config", rank.value("audio_config"), "none, or a model whose encoder of sound is known")
    vision = rank.inside("vision_config")
    size, inner = vision.hidden, vision.number("intermediate_size")
    heads, head = vision.number("num_attention_heads"), vision.number("head_dim")
    shared = vision.number("num_key_value_heads", default=heads)
    layer = 2 * size * (heads + shared) * head + 3 * size * inner + 4 * size + 2 * head
    total = vision.number("num_hidden_layers") * layer + 3 * vision.number("patch_size") ** 2 * size
    total += 2 * vision.number("position_embedding_size") * size
    return rank.vector(total, size * rank.hidden)


def pixtral(rank: Rank) -> int:
    """Pixtral, a merger of patches and two projections of Mistral 3."""
    vision = rank.inside("vision_config")
    size, inner, patch = vision.hidden, vision.number("intermediate_size"), vision.number("patch_size")
    total = rank.vector(size * vision.number("num_channels", default=3) * patch**2, size)
    total += encoder(
        vision,
        "vision_tower.transformer.layers",
        inner,
        norms=2,
        attention="attention.qkv_proj",
        out="attention.o_proj",
        gated=True,
        bias=False,
        mlp=("feed_forward.gate_up_proj", "feed_forward.down_proj"),
    )
    merged = size * rank.around("spatial_merge_size", 2) ** 2
    bias = bool(rank.value("multimodal_projector_bias", False))
    total += rank.vector(size, merged * size)
    total += rank.column("multi_modal_projector.linear_1", size, rank.hidden, bias=bias)
    return total + rank.row("multi_modal_projector.linear_2", rank.hidden, rank.hidden, bias)


def qwen2_5_vl(rank: Rank) -> int:
    """The encoder of Qwen2.5-VL, which EXAONE 4.5 has with key/value heads of its own, and its merger."""
    vision = rank.inside("vision_config")
    size, inner = vision.hidden, vision.number("intermediate_size")
    total = _patches(vision, size) + encoder(vision, "visual.blocks", inner, norms=2, **GATED, **QWEN)
    merged = size * vision.number("spatial_merge_size", default=2) ** 2
    total += rank.vector(size)
    total += rank.column("visual.merger.mlp.0", merged, merged, bias=True)
    return total + rank.row("visual.merger.mlp.2", merged, vision.number("out_hidden_size"), True)


def _patches(vision: Rank, size: int) -> int:
    """A convolution over patches of some images, without bias."""
    depth = vision.number("temporal_patch_size", default=2)
    channels = vision.number("in_channels", "in_chans", default=3)
    return vision.vector(size * channels * depth * vision.number("patch_size") ** 2)


def glm4v(rank: Rank) -> int:
    """The encoder of GLM-4.5V."""
    vision = rank.inside("vision_config")
    size, text, inner = vision.hidden, vision.number("out_hidden_size"), vision.number("intermediate_size")
    total = _patches(vision, size) + rank.vector(size)
    bias = bool(vision.value("attention_bias", False))
    total += encoder(vision, "visual.blocks", text, norms=2, bias=False, attention_bias=bias, **GATED, **QWEN)
    total += rank.column("visual.merger.proj", text, text) + rank.vector(text, text)
    total += rank.column("visual.merger.gate_up_proj", text, inner, inner)
    total += rank.row("visual.merger.down_proj", inner, text)
    positions = (vision.number("image_size") // vision.number("patch_size")) ** 2
    joined = vision.number("spatial_merge_size") ** 2
    return total + rank.vector(positions * size, size, text * size * joined, text, size)


def qwen3_vl(rank: Rank) -> int:
    """The encoder of Qwen3-VL and of Qwen3.5, whose layers feed some of the decoder's."""
    vision = rank.inside("vision_config")
    size, inner = vision.hidden, vision.number("intermediate_size")
    total = _patches(vision, size) + rank.vector(size, vision.number("num_position_embeddings") * size)
    total += encoder(vision, "visual.blocks", inner, norms=4, mlp=("mlp.linear_fc1", "mlp.linear_fc2"), **QWEN)
    merged, text = size * vision.number("spatial_merge_size") ** 2, vision.number("out_hidden_size")
    deep = len(vision.value("deepstack_visual_indexes") or ())
    merger = rank.column("visual.merger.linear_fc1", merged, merged, bias=True)
    merger += rank.row("visual.merger.linear_fc2", merged, text, True)
    return total + (1 + deep) * merger + rank.vector(size, size) + deep * rank.vector(merged, merged)


def llama4(rank: Rank) -> int:
    """The encoder of Llama 4, its adapter and its projection."""
    vision = rank.inside("vision_config")
    size, inner, patch = vision.hidden, vision.number("intermediate_size"), vision.number("patch_size")
    joined = round(1 / float(vision.value("pixel_shuffle_ratio", 0.5)) ** 2)
    total = vision.column(
        "vision_model.patch_embedding.linear", vision.number("num_channels", default=3) * patch**2, size
    )
    total += rank.vector(*[size] * 5, ((vision.number("image_size") // patch) ** 2 + 1) * size)
    names = {"attention": "self_attn.qkv_proj", "out": "self_attn.o_proj"}
    total += encoder(vision, "vision_model.model.layers", inner, norms=4, **names)
    wide, out = vision.number("projector_input_dim"), vision.number("projector_output_dim")
    total += rank.column("vision_model.vision_adapter.mlp.fc1", size * joined, wide)
    total += rank.row("vision_model.vision_adapter.mlp.fc2", wide, out)
    return total + rank.column("multi_modal_projector.linear_1", vision.number("vision_output_dim"), rank.hidden)


def lfm2_vl(rank: Rank) -> int:
    """SigLIP 2 over patches, and two projections."""
    vision = rank.inside("vision_config")
    size, inner = vision.hidden, vision.number("intermediate_size")
    patches = vision.number("num_channels", default=3) * vision.number("patch_size") ** 2
    total = rank.vector(size * patches, size, vision.number("num_patches") * size, size, size)
    total += encoder(vision, "vision_tower.vision_model.encoder.layers", inner, norms=4, **CLIP)
    merged = size * rank.around("downsample_factor", 2) ** 2
    wide, bias = rank.around("projector_hidden_size", 2560), bool(rank.value("projector_bias", True))
    norm = 2 * merged if rank.value("projector_use_layernorm", True) else 0
    return total + rank.vector(merged * wide, bias * wide, wide * rank.hidden, bias * rank.hidden, norm)


def minimax_m3(rank: Rank) -> int:
    """A CLIP encoder over patches of three dimensions, and two pairs of projections."""
    vision = rank.inside("vision_config")
    size, inner, text = vision.hidden, vision.number("intermediate_size"), rank.hidden
    total = _patches(vision, size) + rank.vector(size, size)
    total += encoder(vision, "vision_tower.vision_model.encoder.layers", inner, norms=4, mlp=("fc1", "fc2"), **CLIP)
    wide = rank.around("projector_hidden_size", text)
    for name, inputs in (("multi_modal_projector", size), ("patch_merge_mlp", 4 * text)):
        total += rank.column(f"vision_tower.{name}.linear_1", inputs, wide, bias=True)
        total += rank.row(f"vision_tower.{name}.linear_2", wide, text, True)
    return total


TOWERS: Mapping[str, Tower] = {
    "gemma3": gemma3,
    "gemma4": gemma4,
    "mistral3": pixtral,
    "qwen2_5_vl": qwen2_5_vl,
    "exaone4_5": qwen2_5_vl,
    "glm4v_moe": glm4v,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "llama4": llama4,
    "lfm2_vl": lfm2_vl,
    "minimax_m3_vl": minimax_m3,
}
"""Bytes besides the decoder's on the first pipeline stage, by the outer `model_type`."""
