"""Choice of the family that a config belongs to, and the refusal of those nobody knows."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.model.huggingface import families
from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.families import standard
from hkv.model.huggingface.fields import Fields
from hkv.model.huggingface.inert import is_inert
from hkv.model.huggingface.model import Model
from hkv.model.huggingface.options import ReadOptions

STANDARD_TYPES = frozenset(
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma3n_text",
        "gpt_oss",
        "llama4",
        "llama4_text",
        "cohere2",
        "olmo2",
        "olmo3",
        "phi3",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "smollm3",
        "granite",
        "granitemoe",
    ]
)
"""Model types that the standard fields describe in full; others must have no field beyond those."""


def read_model(config: Mapping[str, Any], options: ReadOptions | None = None) -> Model:
    """Reads from a model's config what each of its layers caches.

    Args:
      config: the `config.json`, or the `text_config` in it.
      options: settings with which the model is served.

    Raises:
      ConfigError: an unknown architecture, naming the fields that were not understood; or an impossible value.
      SpecError: an impossible size.
    """
    fields = Fields.of(config)
    decoder = Decoder(fields, options or ReadOptions())
    for module in pkgutil.iter_modules(families.__path__):
        family = importlib.import_module(f"{families.__name__}.{module.name}")
        if fields.model_type in getattr(family, "MODEL_TYPES", ()):
            return family.read(decoder)
    if fields.model_type not in STANDARD_TYPES:
        unknown = sorted(name for name in fields.values if name not in standard.CACHE_FIELDS and not is_inert(name))
        if unknown:
            expected = f"a known architecture; of this one, {', '.join(unknown)} might decide what is cached"
            raise ConfigError(fields.path + "model_type", fields.model_type, expected)
    return standard.read(decoder)
