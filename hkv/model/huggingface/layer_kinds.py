"""Rules that families share, by which a decoder's layers are full attention or have a window."""

from __future__ import annotations

from collections.abc import Callable

from hkv.errors import ConfigError
from hkv.model.huggingface.fields import Field, Fields

Kinds = list[tuple[str, tuple[str, ...]]]
"""Of each layer its kind and the fields that say so."""

FULL, SLIDING = "full_attention", "sliding_attention"

KNOWN = {FULL: FULL, "attention": FULL, SLIDING: SLIDING, "sliding_window_attention": SLIDING}
"""Names of layer types in configs, and what each is."""


def window_of(fields: Fields) -> Field | None:
    """The window, or None for none: null, or 0 as some files have it."""
    if fields.raw("sliding_window") == 0 or ("use_sliding_window" in fields.family.fields and not using(fields)):
        return None
    return fields.optional("sliding_window")


def using(fields: Fields) -> bool:
    """`use_sliding_window`, without which `sliding_window` says nothing."""
    return fields.flag("use_sliding_window")


def everywhere(fields: Fields) -> Kinds:
    """One window for all layers where the file has one (vLLM 0.33 `CacheConfig.sliding_window`)."""
    return _same(fields, SLIDING if window_of(fields) else FULL)


def stated(fields: Fields) -> Kinds:
    """By `layer_types` where the file has it, else as `everywhere`."""
    listed = fields.names("layer_types", KNOWN)
    return everywhere(fields) if listed is None else [(kind, (place,)) for kind, place in listed]


def patterned(rule: Callable[[int, int], bool]) -> Callable[[Fields], Kinds]:
    """By `layer_types`, else by a rule that the family's config class has.

    Args:
      rule: whether a layer has a window, from its index and the number of layers.
    """

    def kinds(fields: Fields) -> Kinds:
        listed = fields.names("layer_types", KNOWN)
        if listed is not None:
            return [(kind, (place,)) for kind, place in listed]
        count = fields.num_layers
        return [(SLIDING if rule(index, count) else FULL, (fields.place("layer_types"),)) for index in range(count)]

    return kinds


def every(period: int) -> Callable[[Fields], Kinds]:
    """Every so manieth layer is full attention."""
    return patterned(lambda index, _: (index + 1) % period != 0)


def periodic(name: str) -> Callable[[Fields], Kinds]:
    """By `layer_types`, else every so manieth layer is full attention, as a field of that name says."""

    def kinds(fields: Fields) -> Kinds:
        listed = fields.names("layer_types", KNOWN)
        if listed is not None:
            return [(kind, (place,)) for kind, place in listed]
        period = fields.integer(name)
        return [(SLIDING if (i + 1) % period.value else FULL, period.names) for i in range(fields.num_layers)]

    return kinds


def later_layers(fields: Fields) -> Kinds:
    """Qwen2's rule: with `use_sliding_window`, layers from `max_window_layers` on have a window.

    Raises:
      ConfigError: some layers have a window and some none, which vLLM 0.33 does not serve.
    """
    kinds = _listed_or_later(fields)
    if len({kind for kind, _ in kinds}) < 2:
        return kinds
    if fields.count("max_window_layers") == fields.num_layers:
        return _same(fields, FULL)
    place = fields.place("layer_types" if fields.given("layer_types") else "max_window_layers")
    raise ConfigError(place, fields.values.get("max_window_layers"), "a window in all layers or in none, for vLLM 0.33")


def _listed_or_later(fields: Fields) -> Kinds:
    listed = fields.names("layer_types", KNOWN)
    window = window_of(fields)
    if listed is not None:
        return [(kind if window else FULL, (place,)) for kind, place in listed]
    if window is None:
        return _same(fields, FULL)
    first, names = (
        fields.count("max_window_layers"),
        (fields.place("max_window_layers"), fields.place("use_sliding_window")),
    )
    return [(SLIDING if index >= first else FULL, names) for index in range(fields.num_layers)]


def all_or_none(fields: Fields) -> Kinds:
    """A window if all layers have one, else none: the model's own code does not look at single layers (Qwen2-MoE)."""
    listed = fields.names("layer_types", KNOWN)
    if listed is not None and all(kind == SLIDING for kind, _ in listed):
        return everywhere(fields)
    return _same(fields, FULL)


def _same(fields: Fields, kind: str) -> Kinds:
    names = ["sliding_window", *(["use_sliding_window"] if "use_sliding_window" in fields.family.fields else [])]
    return [(kind, tuple(fields.place(name) for name in names))] * fields.num_layers


def shared_layer(fields: Fields, kinds: list[str], index: int) -> int | None:
    """The layer whose cache a layer reads instead of its own: the last own one of its kind (Gemma 3n, Gemma 4).

    Raises:
      ConfigError: no layer before the shared ones is of that kind.
    """
    count = fields.count("num_kv_shared_layers")
    first = len(kinds) - count
    if not count or index < first or first <= 0:
        return None
    for candidate in range(first - 1, -1, -1):
        if kinds[candidate] == kinds[index]:
            return candidate
    expected = f"a {kinds[index]} layer before layer {first}, for layer {index} to share"
    raise ConfigError(fields.place("num_kv_shared_layers"), count, expected)
