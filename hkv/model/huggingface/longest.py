"""Tokens of the longest request that a model's config allows, as vLLM 0.33 derives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.fields import Fields

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
