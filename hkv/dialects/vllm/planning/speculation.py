"""Drafting of tokens: `--speculative-config`, as far as the cache depends on it (vLLM 0.33)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole
from hkv.model.huggingface.family import words
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.reading import decoder_fields

WITH_HIDDEN_STATES = ("mtp", "eagle", "eagle3")
"""Methods whose draft layers read the target's hidden states and the next token, so that a hit drops a block."""

WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods that cache nothing of their own."""

METHODS = (*WITH_HIDDEN_STATES, "draft_model", *WITHOUT_LAYERS)
"""Methods that HKV plans, of vLLM 0.33's."""

ON_V1_RUNNER = ("suffix",)
"""Methods that the V2 model runner does not have; the V1 runner schedules synchronously with them."""

INERT = words(
    """
    attention_backend code_revision draft_sample_method enforce_eager fly_entropy_threshold fly_entropy_top_k
    fly_window_size moe_backend prompt_lookup_max prompt_lookup_min quantization rejection_sample_method revision
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
    suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates use_local_argmax_reduction
    """
)
"""Fields of vLLM's `SpeculativeConfig` on which the cache does not depend."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Drafting of tokens (vLLM 0.33 `SpeculativeConfig`), by a model or config of its own or a part of the target.

    Without the block drop, a hit keeps its last block although the draft's half of it is stale; without lookahead,
    block hashes cover no tokens after their block.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    max_model_len: int | None = None
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError("method", self.method, f"one of {', '.join(METHODS)}")
        check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        for name in ("disable_eagle_block_drop", "disable_lookahead_block_hashes"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(name, getattr(self, name), "true or false")
        if self.method in ("eagle", "eagle3", "draft_model") and self.model is None:
            raise ConfigError("model", None, f"the draft's folder or config.json, with method {self.method}")

    @property
    def drops_block(self) -> bool:
        """True when a hit drops the last block of the draft's group (vLLM 0.33 `use_eagle_block_drop`)."""
        return self.method in WITH_HIDDEN_STATES and not self.disable_eagle_block_drop

    def prefill_lookahead(self, modules: int) -> int:
        """Prompt tokens past the computed ones that the draft reads (vLLM 0.33 `num_prefill_lookahead_tokens`)."""
        if self.method not in WITH_HIDDEN_STATES:
            return 0
        chained = self.method == "mtp" and min(modules, self.num_speculative_tokens) > 1
        return self.num_speculative_tokens if chained else 1


def parse_speculation(text: str) -> Speculation:
    """The speculation that a `--speculative-config` asks for: a JSON object with vLLM's field names."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, Mapping):
        example = '{"method": "mtp", "num_speculative_tokens": 1}'
        raise ConfigError("speculative_config", text, f"a JSON object such as {example}")
    return speculation_of(fields)


def speculation_of(fields: Mapping[str, Any]) -> Speculation:
    """The speculation of a `SpeculativeConfig`'s fields."""
    known = [field.name for field in dataclasses.fields(Speculation)]
    for name, value in fields.items():
        if name not in known and name not in INERT:
            raise ConfigError(f"speculative_config.{name}", value, f"a field of {', '.join(known)}")
    given = {name: value for name, value in fields.items() if name in known and value is not None}
    given.setdefault("method", _method_of(given.get("model")))
    if "num_speculative_tokens" not in given:
        raise ConfigError("speculative_config.num_speculative_tokens", None, "the tokens drafted in a step")
    return Speculation(**given)


def _method_of(model: object) -> str:
    """The method of a config that names none (vLLM 0.33 `SpeculativeConfig.__post_init__`)."""
    name = str(model or "").lower()
    if name in ("ngram", "[ngram]"):
        return "ngram"
    if "eagle-" in name:
        return "eagle"
    return "eagle3" if "eagle3" in name else "draft_model"


# Layers that predict further tokens, as the target's own config has them (vLLM 0.33 `hf_config_override`).


def mtp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the target's MTP layers alone: each of them is a decoder layer of a kind that its family has."""
    fields = decoder_fields(config)
    family = FAMILIES.get(fields.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        expected = f"a model of type {known} with method mtp; of others, the draft's own config (--draft CONFIG)"
        raise ConfigError("model_type", fields.model_type, expected)
    outer = {name: fields.outer[name] for name in ("dtype", "torch_dtype") if name in fields.outer}
    return {**outer, **fields.values, "model_type": fields.model_type, **family(fields)}


def _modules(fields: Fields) -> int:
    """Number of MTP modules; one where the file does not say."""
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
    """Layers with a window and nothing compressed next to it."""
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
