"""Drafting of tokens: `--speculative-config`, as far as the cache depends on it (vLLM 0.33)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole
from hkv.model.huggingface import Model
from hkv.model.huggingface.family import words
from hkv.model.huggingface.fields import MOST_LAYERS, Fields
from hkv.model.huggingface.reading import DERIVED, decoder_fields, known_inside

WITH_HIDDEN_STATES = ("mtp", "eagle", "eagle3")
"""Methods whose draft layers read the target's hidden states and the next token, so that a hit drops a block."""

IN_BLOCKS = ("dflash", "dspark")
"""Methods that draft all tokens at once from the target's hidden states alone: nothing that is cached goes stale."""

WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods that cache nothing of their own."""

METHODS = (*WITH_HIDDEN_STATES, *IN_BLOCKS, "draft_model", *WITHOUT_LAYERS)
"""Methods that HKV plans, of vLLM 0.33's."""

FULL, WINDOW = "full_attention", "sliding_attention"

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
    parallel_drafting: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            known = f"one of {', '.join(METHODS)}; P-EAGLE is eagle3 with parallel_drafting true"
            raise ConfigError("method", self.method, known)
        check_whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        for name in ("disable_eagle_block_drop", "disable_lookahead_block_hashes", "parallel_drafting"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(name, getattr(self, name), "true or false")
        if self.method in ("eagle", "eagle3", "draft_model", "dflash") and self.model is None:
            raise ConfigError("model", None, f"the draft's folder or config.json, with method {self.method}")

    @property
    def on_v1_runner(self) -> bool:
        """True where the V2 model runner lacks the method, or drafts all tokens at once with it (P-EAGLE)."""
        return self.method in ON_V1_RUNNER or (self.parallel_drafting and self.method not in IN_BLOCKS)

    @property
    def drops_block(self) -> bool:
        """True when a hit drops the last block of the draft's group (vLLM 0.33 `use_eagle_block_drop`)."""
        return self.method in WITH_HIDDEN_STATES and not self.disable_eagle_block_drop

    def prefill_lookahead(self, modules: int) -> int:
        """Prompt tokens past the computed ones that the draft reads (vLLM 0.33 `num_prefill_lookahead_tokens`)."""
        if self.method not in (*WITH_HIDDEN_STATES, *IN_BLOCKS):
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
    return next((method for method in ("eagle3", *IN_BLOCKS) if method in name), "draft_model")


def block_draft(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a DFlash or DSpark draft whose `layer_types` are those of its class (vLLM 0.33 `qwen3_dflash`)."""
    fields, own, kinds = decoder_fields(config), config.get("dflash_config") or {}, config.get("layer_types")
    if fields.model_type in WITH_DSPARK:
        return own_layers(config, "dspark")
    if fields.model_type == "k3_dspark":  # one latent a layer, as the file has them
        return dict(config)
    if fields.model_type != "qwen3":
        known = ", ".join(("qwen3", "k3_dspark", *WITH_DSPARK))
        raise ConfigError("model_type", fields.model_type, f"{known}, as DFlash and DSpark drafts have that HKV knows")
    if not isinstance(own, Mapping):
        raise ConfigError("dflash_config", own, "an object")
    if not kinds or (own.get("use_swa") and WINDOW not in kinds):
        kinds = [WINDOW if own.get("use_swa") else FULL] * fields.num_layers
    window = own.get("swa_window_size", config.get("sliding_window"))
    if WINDOW in kinds and window is None:
        raise ConfigError(
            "dflash_config.swa_window_size", None, "a window, or sliding_window, for layers that have one"
        )
    heads = {"head_dim": fields.head_dim.value, "num_key_value_heads": fields.kv_heads.value}
    return {**config, **heads, "model_type": "llama", "layer_types": kinds, "sliding_window": window}


# Layers that predict further tokens, as the target's own config has them (vLLM 0.33 `hf_config_override`).


def own_layers(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """A config of the target's MTP or DSpark layers alone, each a decoder layer of a kind that a family has."""
    fields, families = decoder_fields(config), WITH_DSPARK if method == "dspark" else FAMILIES
    family = families.get(fields.model_type)
    if family is None:
        known = ", ".join(sorted(families))
        expected = f"a model of type {known} with method {method}; of others, the draft's own config (--draft CONFIG)"
        raise ConfigError("model_type", fields.model_type, expected)
    outer = {name: fields.outer[name] for name in ("dtype", "torch_dtype") if name in fields.outer}
    known_fields = known_inside(fields) | DERIVED.keys()
    values = {name: value for name, value in fields.values.items() if name in known_fields}
    return {**outer, **values, "model_type": fields.model_type, **family(fields)}


PROMOTED = ("bailing_hybrid", "minimax_m3_vl_text", "step3p5")
"""Decoders whose own config becomes the draft's, without what is around it."""


def chained(config: Mapping[str, Any], draft: Model) -> int:
    """Number of MTP modules that read one token further each, by the field that vLLM 0.33 reads for it.

    That is one around the decoder, whatever number of layers the draft's class makes (`use_multi_module_mtp`).
    """
    fields = decoder_fields(config)
    if fields.model_type in ("inkling_text", "mimo_v2", "mimo_v2_flash"):
        return draft.num_layers
    values = fields.values if fields.model_type in PROMOTED or not fields.outer else fields.outer
    return values.get("num_nextn_predict_layers") or 1


def _modules(fields: Fields, *names: str) -> int:
    """Number of MTP modules, by the first of some fields that the file has; one where it has none."""
    for values, path in ((fields.values, fields.path), (fields.outer, "")):
        for name in (*names, "num_nextn_predict_layers"):
            count = values.get(name)
            if count is not None:
                if type(count) is not int or not 1 <= count <= MOST_LAYERS:
                    raise ConfigError(path + name, count, "1 or more MTP layers, for method mtp")
                return count
    return 1


def _each(count: int = 0, **kinds: Any) -> Callable[[Fields], dict[str, Any]]:
    """MTP layers that are all alike: the value of each in lists with an entry a layer, or of the whole in others."""

    def changed(fields: Fields) -> dict[str, Any]:
        modules = count or _modules(fields, "mtp_num_hidden_layers")
        lists = {name: value * modules if isinstance(value, list) else value for name, value in kinds.items()}
        return {"num_hidden_layers": modules, **lists}

    return changed


def _listed(begin: bool) -> Callable[[Fields], dict[str, Any]]:
    """MTP layers whose kinds `layer_types` has: at its beginning, or behind those of the decoder."""

    def changed(fields: Fields) -> dict[str, Any]:
        modules, listed = _modules(fields, "num_mtp_layers"), fields.values.get("layer_types")
        first = 0 if begin else fields.num_layers
        kinds = listed[first : first + modules] if isinstance(listed, list) else None
        if isinstance(listed, list) and len(listed) < first + modules:
            raise ConfigError(fields.place("layer_types"), len(listed), f"{first + modules} entries, with MTP layers")
        return {"num_hidden_layers": modules, "layer_types": kinds, "num_nextn_predict_layers": 0}

    return changed


def _typed(fields: Fields) -> dict[str, Any]:
    """MTP layers whose kinds `mtp_layer_types` has; windows without it."""
    modules, kinds = _modules(fields), fields.values.get("mtp_layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != modules):
        raise ConfigError(fields.place("mtp_layer_types"), kinds, f"{modules} entries, one an MTP layer")
    return {"num_hidden_layers": modules, "layer_types": kinds or [WINDOW] * modules}


def _sparse(fields: Fields) -> dict[str, Any]:
    """Attention with an indexer, whatever the target's layer of that number has."""
    modules, sparse = _modules(fields, "num_mtp_modules"), fields.values.get("sparse_attention_config")
    sparse = {**sparse, "sparse_attention_freq": [1] * modules} if isinstance(sparse, Mapping) else None
    return {"num_hidden_layers": modules, "layer_types": None, "sparse_attention_config": sparse}


def _pattern(fields: Fields) -> dict[str, Any]:
    """Attention and experts, in the order that a pattern of their own has."""
    pattern = fields.values.get("mtp_hybrid_override_pattern")
    kinds = fields.values.get("mtp_layers_block_type") or [FULL, "moe"]
    _modules(fields)
    return {
        "hybrid_override_pattern": pattern,
        "layers_block_type": None if pattern else kinds,
        "layer_types": None,
        "num_hidden_layers": len(pattern or kinds),
    }


def _convolved(fields: Fields) -> dict[str, Any]:
    """Layers with windows of their own, which `mtp_config` lists."""
    own = fields.outer.get("mtp_config") or {}
    modules = own.get("num_nextn_predict_layers", 0) if isinstance(own, Mapping) else 0
    if type(modules) is not int or modules < 1:
        raise ConfigError("mtp_config.num_nextn_predict_layers", modules, "1 or more MTP layers, for method mtp")
    return {"num_hidden_layers": modules, "layer_types": None, "local_layer_ids": own.get("local_layer_ids", [])}


def _dspark(fields: Fields) -> dict[str, Any]:
    """Windows alone, three layers where the file does not say (vLLM 0.33 `DSparkDeepseekV4Model`)."""
    count = fields.values.get("n_mtp_layers") or 3
    if type(count) is not int or not 1 <= count <= MOST_LAYERS:
        raise ConfigError(fields.place("n_mtp_layers"), count, "1 or more DSpark layers")
    return _each(count, **_WINDOWS)(fields)


_WINDOWS = {"layer_types": None, "compress_rates": None, "compress_ratios": [0]}
_LIKE_THE_TARGET, _ATTENTION = _each(), _each(layer_types=[FULL])

FAMILIES: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    **dict.fromkeys(
        ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr_text", "hy_v3", "pangu_ultra_moe"),
        _LIKE_THE_TARGET,
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "mimo"), _ATTENTION),
    **dict.fromkeys(("exaone_moe", "exaone4_5_text"), _listed(begin=True)),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), _each(1, hybrid_layer_pattern=[1], layer_types=None)),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),  # each with an indexer, where the target's layers share some too
        _each(index_topk_freq=1, index_topk_pattern=None, indexer_types=None, layer_types=None),
    ),
    "bailing_hybrid": _each(layer_group_size=1),
    "deepseek_v4": _each(**_WINDOWS),
    "dots3_note": _typed,
    "hy_v4": _each(indexer_types=["full"], layer_types=None),
    "inkling_text": _convolved,
    "kimi_linear": _each(layer_types=[FULL], linear_attn_config=None),
    "longcat_flash": _each(1, model_type="deepseek_v3", layer_types=None),
    "minimax_m3_vl_text": _sparse,
    "nemotron_h": _pattern,
    "step3p5": _listed(begin=False),
}
"""Fields of the MTP layers in place of the target's, by the target's `model_type`."""

WITH_DSPARK: Mapping[str, Callable[[Fields], dict[str, Any]]] = {"deepseek_v4": _dspark}
"""The same of DSpark layers that stand in the target's checkpoint."""
