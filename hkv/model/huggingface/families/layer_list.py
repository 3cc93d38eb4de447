"""Layers listed by hand, for a model whose `config.json` HKV does not read.

The file is an object like any config:

    {"model_type": "layer_list", "dtype": "bfloat16", "max_position_embeddings": 131072, "layers": [
      {"kind": "full_attention", "kv_heads": 8, "head_dim": 128},
      {"kind": "sliding_attention", "window": 4096, "kv_heads": 8, "head_dim": 128, "count": 5},
      {"kind": "chunked_attention", "window": 8192, "kv_heads": 8, "head_dim": 128, "value_dim": 64},
      {"kind": "cross_attention", "encoder_len": 1500, "kv_heads": 20, "head_dim": 64},
      {"kind": "latent", "rank": 512, "rope": 64},
      {"kind": "state", "shapes": [[3, 8192], [32, 128, 128]], "dtypes": ["bfloat16", "float32"]},
      {"kind": "none"}
    ]}

`count` repeats an entry. Heads are of the whole model; a state's shapes are those of one tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.decoder import CROSS, Decoder
from hkv.model.huggingface.families.attention import CHUNKED, FULL, SLIDING
from hkv.model.huggingface.fields import MOST_LAYERS, Field
from hkv.model.huggingface.model import Model
from hkv.spec.dtypes import ITEM_BYTES

ATTENTION = ("kv_heads", "head_dim")
PARTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    FULL: (ATTENTION, ("value_dim",)),
    SLIDING: ((*ATTENTION, "window"), ("value_dim",)),
    CHUNKED: ((*ATTENTION, "window"), ("value_dim",)),
    CROSS: ((*ATTENTION, "encoder_len"), ("value_dim",)),
    "latent": (("rank", "rope"), ()),
    "state": (("shapes", "dtypes"), ()),
    "none": ((), ()),
}
"""Kinds of layers, each with the parts that an entry of it must have and those that it may have."""


def _read(decoder: Decoder) -> Model:
    entries, place = decoder.fields.raw("layers"), decoder.fields.place("layers")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(place, entries, "a list of layers")
    index = 0
    for number, entry in enumerate(entries):
        where = f"{place}[{number}]"
        for _ in range(_checked(entry, where)):
            _add(decoder, index, entry, where)
            index += 1
            if index > MOST_LAYERS:
                raise ConfigError(where, index, f"at most {MOST_LAYERS} layers")
    return decoder.model(index)


def _checked(entry: object, place: str) -> int:
    """Number of times that an entry counts, once its kind and its parts are known."""
    if not isinstance(entry, Mapping):
        raise ConfigError(place, entry, "an object")
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in PARTS:
        raise ConfigError(f"{place}.kind", kind, f"one of {', '.join(PARTS)}")
    needed, possible = PARTS[kind]
    for name in needed:
        if entry.get(name) is None:
            raise ConfigError(f"{place}.{name}", None, f"a value: a layer of kind {kind} needs one")
    for name, value in entry.items():
        if name not in ("kind", "count", *needed, *possible):
            expected = f"one of {', '.join(('kind', 'count', *needed, *possible))} in a layer of kind {kind}"
            raise ConfigError(f"{place}.{name}", value, expected)
    count = entry.get("count", 1)
    check_whole(f"{place}.count", count, 1, MOST_LAYERS)
    return count


def _add(decoder: Decoder, index: int, entry: Mapping[str, Any], place: str) -> None:
    kind, names = entry["kind"], (f"{place}.kind",)

    def part(name: str) -> Field | None:
        if entry.get(name) is None:
            return None
        check_whole(f"{place}.{name}", entry[name], 1, MAX_TOKENS)
        return Field(entry[name], (f"{place}.{name}",))

    if kind == "latent":
        rank, rope = part("rank"), part("rope")
        assert rank is not None
        assert rope is not None
        decoder.latent(index, names, sizes=(rank, rope))
    elif kind == "state":
        shapes, dtypes = _states(entry, place)
        typed = tuple((dtype, (f"{place}.dtypes",)) for dtype in dtypes)
        decoder.state(index, names, shapes, typed, (f"{place}.shapes",))
    elif kind != "none":
        decoder.attention(
            index,
            kind,
            names,
            heads=part("kv_heads"),
            head_dim=part("head_dim"),
            value_dim=part("value_dim"),
            window=part("window") or part("encoder_len"),
        )


def _states(entry: Mapping[str, Any], place: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Shapes and element types of an entry's states."""
    shapes, dtypes = entry["shapes"], entry["dtypes"]
    if not isinstance(shapes, list) or not shapes or not all(isinstance(shape, list) and shape for shape in shapes):
        raise ConfigError(f"{place}.shapes", shapes, "a list of shapes, each a list of extents")
    for shape in shapes:
        for extent in shape:
            check_whole(f"{place}.shapes", extent, 1, MAX_TOKENS)
    known = isinstance(dtypes, list) and all(isinstance(dtype, str) and dtype in ITEM_BYTES for dtype in dtypes)
    if not known or len(dtypes) != len(shapes):
        raise ConfigError(f"{place}.dtypes", dtypes, f"{len(shapes)} of {', '.join(ITEM_BYTES)}")
    return tuple(tuple(shape) for shape in shapes), tuple(dtypes)


READERS: Mapping[str, Callable[[Decoder], Model]] = {"layer_list": _read}
