"""Layers that predict further tokens, as the target's own config has them (vLLM 0.33 `hf_config_override`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.reading import decoder_fields


def mtp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the target's MTP layers alone: each of them is a decoder layer of a kind that its family has.

    Args:
      config: the target's `config.json`.

    Raises:
      ConfigError: the family has no such layers that HKV knows.
    """
    fields = decoder_fields(config)
    family = FAMILIES.get(fields.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        expected = f"a model of type {known} with method mtp; of others, the draft's own config (--draft CONFIG)"
        raise ConfigError("model_type", fields.model_type, expected)
    outer = {name: fields.outer[name] for name in ("dtype", "torch_dtype") if name in fields.outer}
    return {**outer, **fields.values, "model_type": fields.model_type, **family(fields)}


def _modules(fields: Fields) -> int:
    """Number of MTP modules; one where the file does not say.

    Raises:
      ConfigError: it is no positive integer.
    """
    count = fields.values.get("num_nextn_predict_layers")
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= fields.num_layers:
        raise ConfigError(fields.path + "num_nextn_predict_layers", count, "1 or more MTP layers, for method mtp")
    return count


def _like_the_target(fields: Fields) -> dict[str, Any]:
    """Latent layers, each with an indexer where the target has them."""
    shared = [name for name in ("index_topk_freq", "index_topk_pattern", "indexer_types") if fields.values.get(name)]
    if shared:
        raise ConfigError(fields.path + shared[0], fields.values[shared[0]], "none, with method mtp")
    return {"num_hidden_layers": _modules(fields)}


def _full_attention(fields: Fields) -> dict[str, Any]:
    """Layers of full attention, whatever the target's are."""
    count = _modules(fields)
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


def _of_one_part(fields: Fields) -> dict[str, Any]:
    """One layer of full attention, counted by a field of its own."""
    count = fields.values.get("mtp_num_hidden_layers", 1)
    if count != 1:
        raise ConfigError(fields.path + "mtp_num_hidden_layers", count, "1 MTP layer, for method mtp")
    return {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def _windows(fields: Fields) -> dict[str, Any]:
    """Layers with a window and nothing compressed beside it."""
    count = _modules(fields)
    return {"num_hidden_layers": count, "layer_types": None, "compress_ratios": [0] * count}


FAMILIES: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "deepseek_v3": _like_the_target,
    "deepseek_v32": _like_the_target,
    "deepseek_v4": _windows,
    "glm4_moe": lambda fields: {"num_hidden_layers": _modules(fields)},
    "qwen3_next": _full_attention,
    "qwen3_5_text": _of_one_part,
    "qwen3_5_moe_text": _of_one_part,
}
"""Fields of the MTP layers in place of the target's, by the target's `model_type`."""
