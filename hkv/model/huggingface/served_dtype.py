"""The element type that vLLM 0.33 serves a model with, and the one that a quantized checkpoint asks for its cache."""

from __future__ import annotations

from collections.abc import Mapping

from hkv.errors import ConfigError
from hkv.model.huggingface.family import words
from hkv.model.huggingface.fields import Fields
from hkv.spec.dtypes import ITEM_BYTES

PREFERRED = "bfloat16"
"""Element type of models whose files name none, or float32 (`_resolve_auto_dtype`)."""

WITHOUT_FLOAT16 = frozenset(["gemma2", "gemma3", "gemma3_text", "glm4"])
"""Model types that vLLM does not serve in float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`)."""


def served_dtype(fields: Fields) -> tuple[str, tuple[str, ...]]:
    """Element type by name, and the field it came from; the whole model's goes before its decoder's.

    Raises:
      ConfigError: the file names an element type that no cache has.
    """
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
    """Makes sure that a checkpoint is in a format that vLLM loads: any other may ask for a cache of its own.

    Raises:
      ConfigError: it is in another.
    """
    for values, path in ((fields.outer, ""), (fields.values, fields.path)):
        found = values.get("quantization_config")
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        if method and str(method).lower().replace("compressed_tensors", "compressed-tensors") not in QUANTIZATIONS:
            expected = f"a format of weights that vLLM 0.33 loads, one of {', '.join(sorted(QUANTIZATIONS))}"
            raise ConfigError(f"{path}quantization_config.quant_method", method, expected)


def quantized_cache(fields: Fields) -> tuple[str, tuple[str, ...]] | None:
    """The packing that a quantized checkpoint asks for, and the field that does; None where it asks for none.

    A `kv_cache_scheme` of compressed-tensors, or `kv_cache_scheme` and `kv_cache_quant_algo` of ModelOpt (vLLM 0.33
    `Attention`, `get_kv_cache_quant_algo_string`).

    Raises:
      ConfigError: a scheme that HKV does not know.
    """
    for values, path in ((fields.outer, ""), (fields.values, fields.path)):
        quantization = values.get("quantization_config")
        if not isinstance(quantization, Mapping):
            continue
        inner = quantization.get("quantization")
        for part, place in ((inner, "quantization_config.quantization."), (quantization, "quantization_config.")):
            if not isinstance(part, Mapping):
                continue
            for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
                scheme = part.get(name)
                if name == "kv_cache_scheme" and isinstance(scheme, str):
                    told = f"{path}{place}{name} = {scheme!r}: no object, so that vLLM caches as without it"
                    fields.notes["kv_cache_scheme"] = told
                elif scheme is not None:
                    return _packing(scheme, path + place + name), (path + place + name,)
    return None


def _packing(scheme: object, place: str) -> str:
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
        return "fp8"
    if isinstance(scheme, str) and scheme.lower() in ("fp8", "fp8_e4m3"):
        return "fp8"
    raise ConfigError(place, scheme, "an 8-bit float scheme; name another packing with kv_dtype")
