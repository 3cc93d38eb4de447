"""Fields that all families read alike: the longest request, the element type, a quantized checkpoint's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.family import words
from hkv.model.huggingface.fields import Fields
from hkv.spec.dtypes import ITEM_BYTES

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Fields that bound a request; the smallest does, except that `model_max_length` goes before all
(`derive_max_model_len_and_key`)."""

UNKNOWN = 2048
"""Tokens where no field bounds a request."""

NEEDS_FACTOR = frozenset(["yarn", "deepseek_yarn"])
"""Kinds of rotary scaling that vLLM builds with a factor alone (`get_rope`)."""

UNSCALED = frozenset(["su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"])
"""Kinds of rotary scaling whose factor the file's length already counts (`_get_and_verify_max_len`)."""


def longest_request(fields: Fields) -> int:
    """Tokens of the longest request."""
    length, place = _stated(fields)
    scalings = list(scalings_of(fields))
    if any(kind == "longrope" for kind, _, _ in scalings):
        name = "original_max_position_embeddings"
        original = fields.raw(name) if name in fields.family.fields else fields.values.get(name)
        if original is not None:
            check_whole(fields.place(name), original, 1, MAX_TOKENS)
            return original
    factor: Any = 1
    for kind, scaling, where in scalings:
        if kind in NEEDS_FACTOR and scaling.get("factor") is None:
            raise ConfigError(
                where + ".factor", None, f"a number: without one vLLM builds no rotary positions of {kind}"
            )
        if kind not in UNSCALED:
            factor = scaling.get("factor", factor)
            if factor is None:
                factor = 1
            if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
                raise ConfigError(where + ".factor", factor, "a positive number")
    longest = length * factor if "gemma3" not in fields.model_type else length
    if not 1 <= longest <= MAX_TOKENS:
        raise ConfigError(place, longest, f"1 to {MAX_TOKENS} tokens")
    return int(longest)


def _stated(fields: Fields) -> tuple[int, str]:
    """The length that fields state, and the field."""
    found: list[tuple[int, str]] = []
    for name in LENGTHS:
        if name in fields.family.fields or name in fields.values:
            value = fields.raw(name) if name in fields.family.fields else fields.values[name]
            if value is not None:
                check_whole(fields.place(name), value, 1, MAX_TOKENS)
                found.append((value, name))
    for value, name in found:
        if name == "model_max_length":
            return value, fields.place(name)
    if found:
        value, name = min(found)
        return value, fields.place(name)
    fields.notes["max_position_embeddings"] = f"at most {UNKNOWN} tokens a request, as vLLM takes it: not in the file"
    return UNKNOWN, fields.place("max_position_embeddings")


def scalings_of(fields: Fields) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Kind, parameters and place of each rotary scaling: of `rope_scaling`, else of `rope_parameters`."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.values.get(name)
        if not scaling:
            continue
        place = fields.path + name
        if not isinstance(scaling, Mapping):
            raise ConfigError(place, scaling, "an object")
        parts = {place: scaling}
        if all(isinstance(value, Mapping) for value in scaling.values()):
            parts = {f"{place}.{kind}": value for kind, value in scaling.items()}
        for where, part in parts.items():
            yield str(part.get("rope_type", part.get("type", "default"))), part, where
        return


# The element type that vLLM 0.33 serves a model with, and the one that a quantized checkpoint asks for its cache.

PREFERRED = "bfloat16"
"""Element type of models whose files name none, or float32 (`_resolve_auto_dtype`)."""

WITHOUT_FLOAT16 = frozenset(["gemma2", "gemma3", "gemma3_text", "glm4"])
"""Model types that vLLM does not serve in float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`)."""


def served_dtype(fields: Fields) -> tuple[str, tuple[str, ...]]:
    """Element type by name, and the field it came from; the whole model's goes before its decoder's."""
    for values, path in ((fields.outer, ""), (fields.values, fields.path)):
        for name in ("dtype", "torch_dtype"):
            value = values.get(name)
            if value is None:
                continue
            dtype = value.removeprefix("torch.") if isinstance(value, str) else value
            if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                raise ConfigError(path + name, value, f"one of {', '.join(ITEM_BYTES)}")
            outermost = fields.outer.get("model_type", fields.model_type)
            if dtype == "float32" or (dtype == "float16" and outermost in WITHOUT_FLOAT16):
                dtype = PREFERRED
            return dtype, (path + name,)
    fields.notes["dtype"] = f"dtype = {PREFERRED}, as vLLM serves a model that names none: not in the file"
    return PREFERRED, ()


QUANTIZATIONS = words(
    """
    auto-round auto_awq auto_gptq awq awq_marlin compressed-tensors deepseek_v4_fp8 experts_int8 fp8 gpt_oss_mxfp4 gptq
    gptq_marlin humming inc modelopt modelopt_fp4 modelopt_mixed modelopt_mxfp8 moe_wna16 mxfp4 mxfp8 online quark
    torchao fp8_per_tensor fp8_per_block fp8_per_channel int8_per_channel_weight_only nvfp4_per_token
    """
)
"""Names of quantized checkpoints' formats that vLLM 0.33 loads (`QuantizationMethods`, without deprecated ones)."""


def check_quantization(fields: Fields) -> None:
    """Makes sure that a checkpoint is in a format that vLLM loads: any other may ask for a cache of its own."""
    for values, path in ((fields.outer, ""), (fields.values, fields.path)):
        found = values.get("quantization_config")
        found = found if isinstance(found, Mapping) else {}
        if (method := found.get("quant_method")) and quantization_method(found) not in QUANTIZATIONS:
            expected = f"a format of weights that vLLM 0.33 loads, one of {', '.join(sorted(QUANTIZATIONS))}"
            raise ConfigError(f"{path}quantization_config.quant_method", method, expected)


MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
"""ModelOpt's types of a cache, and vLLM's (vLLM 0.33 `MODELOPT_TO_VLLM_KV_CACHE_DTYPE_MAP`)."""

SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Fields that ask for a type of the cache."""


def quantized_cache(fields: Fields, latent: bool = False) -> tuple[str, tuple[str, ...]] | None:
    """The type of the cache that a quantized checkpoint asks for, and the field that does; None where it asks for none.

    ModelOpt's do so outside of a multimodal model's decoder, and what vLLM 0.33 does not know of theirs it passes over
    (`get_kv_cache_quant_algo_string`); compressed-tensors' by a scheme, which layers of keys and values alone look at
    (`Attention`). No other format's are read.
    """
    found = _quantization(fields)
    if found is None:
        return None
    quantization, path, outermost = found
    inner = quantization.get("quantization", quantization)
    parts = [(quantization, path)]
    if isinstance(inner, Mapping) and inner is not quantization:
        parts.insert(0, (inner, f"{path}quantization."))
    asked = {f"{place}{name}": part[name] for name in SCHEMES for part, place in parts if part.get(name)}
    if not asked:
        return None
    place, scheme = next(iter(asked.items()))
    method = quantization_method(quantization)
    dtype = None
    if method.startswith("modelopt") and outermost:
        dtype = _modelopt(scheme)
    elif method == "compressed-tensors" and place == f"{path}kv_cache_scheme" and not latent:
        if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8 or scheme.get("type") != "float":
            raise ConfigError(place, scheme, "an 8-bit float scheme; name another packing with kv_dtype")
        dtype = "fp8"
    if dtype is None:
        fields.notes["kv_cache_scheme"] = f"{place} = {scheme!r}: vLLM 0.33 does not read it, and caches as without it"
        return None
    return dtype, (place,)


def _quantization(fields: Fields) -> tuple[Mapping[str, Any], str, bool] | None:
    """The config's `quantization_config`, its path in the file, and whether it stands outside of the decoder's part."""
    for values, path in ((fields.outer or fields.values, ""), (fields.values, fields.path)):
        found = values.get("quantization_config")
        if isinstance(found, Mapping):
            return found, f"{path}quantization_config.", values is not fields.values or not fields.outer
    return None


def quantization_method(quantization: Mapping[str, Any]) -> str:
    """The format's name (vLLM 0.33 `_normalize_quantization_config`)."""
    producer, inner = quantization.get("producer"), quantization.get("quantization")
    if isinstance(inner, Mapping) and inner.get("quant_algo") is not None:
        named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
        if named or "modelopt_quant_config" in inner:
            return "modelopt"
    return str(quantization.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")


def _modelopt(scheme: object) -> str | None:
    if isinstance(scheme, Mapping):
        kind = scheme.get("num_bits"), scheme.get("type")
        if kind == (8, "float") and scheme.get("dynamic") is False:
            return MODELOPT["fp8"]
        return MODELOPT["nvfp4"] if kind == (4, "float") else None
    return MODELOPT.get(scheme.lower()) if isinstance(scheme, str) else None
