"""VLLM's text over plain objects: an empty cache of a configuration, and its state in the words of logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig, eagle_groups, finder_groups, keeps_shared_boundaries
from hkv.errors import ConfigError
from hkv.spec import LayerSpec
from hkv.version import check_reference

check_reference()  # before the first import of it

from reference.dialects.vllm.records import DENSE, UNBOUNDED, Cache, Group, Kind, Row, at_column  # noqa: E402
from reference.language import Layout, Table  # noqa: E402

LAYOUT = Layout(Cache)
"""Names and places of the state of vLLM's cache."""

KINDS = {
    "chunked_local": Kind.CHUNK,
    "chunk_pair": Kind.PAIR,
    "sink_window": Kind.SINKS,
    "opaque": Kind.RING,
    "cross_attention": Kind.ENCODER,
}
"""Rules of kinds of layers that have some of their own."""


def kind_of(spec: LayerSpec) -> Kind:
    """The rules of a layer."""
    if spec.snapshot:
        return Kind.STATE if spec.keeps_states else Kind.WINDOW
    return KINDS.get(spec.kind, Kind.FULL if spec.reads_all else Kind.WINDOW)


def settings(config: VllmConfig, *, events: bool = True, explains: bool = True, tells: bool = True) -> dict[str, int]:
    """The configuration of the text, by names of its scalars.

    Args:
      config: the configuration.
      events: whether KV events are told.
      explains: whether what became of keys is noted.
      tells: whether answers have the blocks of rows.
    """
    specs, groups = config.topology.specs, groups_of(config)
    interval, caching = config.retention_interval, config.caching
    alone = len(specs) == 1
    finders = finder_groups(config)
    fine = [group["scale"] for group in groups if group["kind"] in (Kind.FULL, Kind.STATE)]
    found = {
        "width": len(specs),
        "finders": len(finders),
        "parts": max(fine, default=1) if caching else 1,
        "hash": config.hash_block_size,
        "grid": config.scheduler_block_size,
        "alignment": config.hit_alignment,
        "pool": config.num_blocks - 1,
        "longest": config.max_model_len,
        "watermark": config.watermark_blocks,
        "caching": caching,
        "partial": config.partial_hits and not alone,
        "alone": alone,
        "once": alone or (len(finders) == 2 and specs[finders[0][0]].reads_all),
        "completed": config.completed_group is not None,
        "eagle": config.uses_eagle,
        "lookahead": config.hash_lookahead,
        "prefill": max(0, config.prefill_lookahead - 1),
        "interval": DENSE if interval is None else interval,
        "branches": keeps_shared_boundaries(config),
        "below": config.retains_below_shared_boundaries,
        "again": config.registers_tails_again,
        "states": any(group["kind"] == Kind.STATE for group in groups),
        "runs": any(group["kind"] in (Kind.CHUNK, Kind.PAIR, Kind.SINKS) for group in groups),
        "exporting": any(group["exports"] for group in groups),
        "twins": any(len(members) > 1 for members in finders),
        "sinks": any(group["sinks"] for group in groups),
        "events": events,
        "zeroing": config.zeroing,
        "offering": config.offloads,
        "tells": tells,
        "explains": explains,
    }
    defects = (name.removeprefix("defects.") for name in LAYOUT.settings if name.startswith("defects."))
    known = {f"defects.{name}": name.replace("_", "-") in config.bugs for name in defects}
    return {name: int(value) for name, value in {**{f"config.{name}": x for name, x in found.items()}, **known}.items()}


def groups_of(config: VllmConfig) -> list[dict[str, Any]]:
    """Fields of each group, but for those that hold groups.

    Raises:
      ConfigError: hits that end where a kind cannot resume, or no kind that can be cached.
    """
    specs, finders = config.topology.specs, finder_groups(config)
    eagle, alone = eagle_groups(config, finders), len(specs) == 1
    if config.caching and not alone and not finders:
        raise ConfigError("groups", len(specs), "one kind at least that can be cached, or caching off")
    groups = []
    for g, spec in enumerate(specs):
        numbers = kinds.module(spec).parameters(config, g, spec, g in eagle)
        kind, size = kind_of(spec), config.block_size(g)
        groups.append(
            {
                "place": g + 1,
                "kind": kind,
                "size": size,
                "scale": max(1, size // config.hash_block_size),
                "spec_size": spec.block_size,
                "unit": numbers.get("UNIT", 1),
                "lookback": min(numbers.get("LOOKBACK", UNBOUNDED), UNBOUNDED),
                "sinks": -(-spec.sinks // size),
                "need": max(0, numbers.get("NEED", 1)),
                "steps": 1 if alone else max(1, config.hit_alignment // size),
                "cap": min(numbers.get("CAP", UNBOUNDED), UNBOUNDED),
                "spare": 0 if kind == Kind.STATE else spec.block_size * spec.scratch_blocks,
                "scratch": spec.scratch_blocks if kind == Kind.STATE else 0,
                "exports": numbers.get("EXPORT_STEP", 0),
                "fine": kind in (Kind.FULL, Kind.STATE) and size > config.hash_block_size,
                "drops": g in eagle,
                "cached": config.caching and spec.prefix_cacheable,
                "zeroed": config.zeroes(g),
                "offered": config.offers(g),
            }
        )
    return groups


def columns_of(config: VllmConfig, tokens: int) -> int:
    """Columns that rows have at most for so many tokens."""
    tokens = max(tokens, config.encoder_tokens)
    return max(-(-(tokens + each["spare"]) // each["size"]) + each["scratch"] for each in groups_of(config)) + 2


def empty(
    config: VllmConfig,
    *,
    keys: int,
    requests: int,
    tokens: int,
    least: Mapping[str, int] = MappingProxyType({}),
    **told: bool,
) -> Cache:
    """An empty cache.

    Args:
      config: the configuration.
      keys: names of prefixes that there is room for.
      requests: requests at the same time.
      tokens: of a request, drafts and what is loaded included.
      least: sizes that are more than that asks for, by names of the layout: of operations, of what they tell.
      told: as of `settings`.

    Raises:
      ConfigError: hits that end where a kind cannot resume.
    """
    numbers, groups = settings(config, **told), groups_of(config)
    requests = max(requests, least.get("requests", 0))
    width, columns = len(groups), columns_of(config, tokens)
    by_block = ("blocks.known", "blocks.later", "blocks.sooner")
    by_group = ("requests.rows", "results.own", "results.first", "results.end", "operations.loaded")
    sizes = {
        **{"groups": width, "blocks": config.num_blocks, "entries": keys * width, "rows": requests * width},
        **{"requests": requests, "operations": 1, "results": 1, "news": 1, "offers": 1, "copies": config.num_blocks},
        **{"order": width, "payload": max((columns + 1) * width, config.num_blocks), "ids": columns * width},
        **{"requests.chain": tokens // config.hash_block_size + 2, **dict.fromkeys(by_group, width + 1)},
        **dict.fromkeys(by_block, numbers["config.parts"]),
        **dict.fromkeys(("rows.blocks", "rows.stands"), columns),
    }
    cache: Cache = LAYOUT.make({name: max(size, least.get(name, 0)) for name, size in sizes.items()})
    for name, value in numbers.items():
        part, _, field = name.partition(".")
        setattr(getattr(cache, part), field, value)
    finders = finder_groups(config)
    for group, fields in zip(cache.groups[1:], groups, strict=False):
        for name, value in fields.items():
            setattr(group, name, int(value))
        group.leader = group
    for place, members in enumerate(finders):
        cache.order[place] = cache.groups[members[0] + 1]
        for member, after in zip(members, [*members[1:], -1], strict=True):
            cache.groups[member + 1].leader = cache.order[place]
            cache.groups[member + 1].twin = cache.groups[after + 1]
    ring = cache.free
    ring.ends = cache.blocks[-1]
    ring.newer[ring.ends] = ring.older[ring.ends] = ring.ends
    for block in cache.blocks[1 : config.num_blocks]:
        ring.put(block)
    ring.count, cache.step, cache.slots = config.num_blocks - 1, 1, 0
    take_rows(cache)
    return cache


class Endless(Table[Any]):
    """A table of plain objects that grows as it is asked for more records."""

    def __init__(self, cache: Cache, name: str) -> None:
        super().__init__(getattr(cache, name))
        self._cache, self._name = cache, name

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int) and place >= len(self):
            LAYOUT.grow(self._cache, self._name, len(self))
        return super().__getitem__(place)


def endless(cache: Cache) -> Cache:
    """A cache with room for whatever it has to tell."""
    cache.news, cache.offers = Endless(cache, "news"), Endless(cache, "offers")
    return cache


def take_rows(cache: Cache) -> None:
    """Gives requests that have none their rows."""
    width = cache.config.width
    for slot, request in enumerate(cache.requests[cache.slots + 1 :], cache.slots):
        request.rows[1 : width + 1] = cache.rows[1 + slot * width : 1 + (slot + 1) * width]
        for row in request.rows[1 : width + 1]:
            row.looked = -1
    cache.slots = len(cache.requests) - 1


def columns(group: Group, row: Row, start: int = 0) -> Sequence[Any]:
    """Blocks of a row from a column on, None where there is none."""
    return [at_column(group, row, column) for column in range(start, row.length)]
