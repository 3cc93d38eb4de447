"""Drafting of tokens: `--speculative-config`, as far as the cache depends on it (vLLM 0.33)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_SPECULATIVE_TOKENS, MAX_TOKENS, check_whole

WITH_HIDDEN_STATES = ("mtp", "eagle", "eagle3")
"""Methods whose draft layers read the target's hidden states and the next token, so that a hit drops a block."""

WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods that cache nothing of their own."""

METHODS = (*WITH_HIDDEN_STATES, "draft_model", *WITHOUT_LAYERS)
"""Methods that HKV plans, of vLLM 0.33's."""

ON_V1_RUNNER = ("suffix",)
"""Methods that the V2 model runner does not have; the V1 runner schedules synchronously with them."""

INERT = frozenset(
    [
        "attention_backend",
        "code_revision",
        "draft_sample_method",
        "enforce_eager",
        "fly_entropy_threshold",
        "fly_entropy_top_k",
        "fly_window_size",
        "moe_backend",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "quantization",
        "rejection_sample_method",
        "revision",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
        "use_local_argmax_reduction",
    ]
)
"""Fields of vLLM's `SpeculativeConfig` on which the cache does not depend."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Drafting of tokens (vLLM 0.33 `SpeculativeConfig`).

    Attributes:
      method: one of `METHODS`.
      num_speculative_tokens: tokens drafted in a step.
      model: folder or config of the draft, or None where it is part of the target.
      max_model_len: tokens of the draft's longest request, or None for its config's.
      disable_eagle_block_drop: a hit keeps its last block although the draft's half of it is stale.
      disable_lookahead_block_hashes: block hashes cover no tokens after their block.
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
        """Prompt tokens past the computed ones that the draft reads (vLLM 0.33 `num_prefill_lookahead_tokens`).

        Args:
          modules: MTP modules that the model has.
        """
        if self.method not in WITH_HIDDEN_STATES:
            return 0
        chained = self.method == "mtp" and min(modules, self.num_speculative_tokens) > 1
        return self.num_speculative_tokens if chained else 1


def parse_speculation(text: str) -> Speculation:
    """The speculation that a `--speculative-config` asks for: a JSON object with vLLM's field names.

    Raises:
      ConfigError: it is none, a field is unknown or has no such value.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, Mapping):
        example = '{"method": "mtp", "num_speculative_tokens": 1}'
        raise ConfigError("speculative_config", text, f"a JSON object such as {example}")
    return speculation_of(fields)


def speculation_of(fields: Mapping[str, Any]) -> Speculation:
    """The speculation of a `SpeculativeConfig`'s fields.

    Raises:
      ConfigError: a field is unknown or has no such value.
    """
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
