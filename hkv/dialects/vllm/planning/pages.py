"""One page size for layers of different sizes: larger blocks where that works out, padding where it does not."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import manager_block
from hkv.dialects.vllm.planning.plan import PlannedGroup, PlanOptions
from hkv.errors import HKVError, PlanError
from hkv.layout.orders import Order
from hkv.spec import LayerSpec, attention_of, is_latent


class PagesDiffer(PlanError):  # noqa: N818
    """The pages of these layers cannot be made equal."""


def unify_pages(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> dict[str, LayerSpec]:
    """The same layers with pages of one size (vLLM 0.33 `unify_kv_cache_spec_page_size`).

    The largest page stands. A recurrent state is padded to it, whatever its block size; a page that divides it gets
    that many times the tokens; any other attention page but a latent one is padded.
    """
    largest = max(spec.page_size_bytes for spec in layers.values())
    if all(spec.page_size_bytes == largest for spec in layers.values()):
        return dict(layers)
    return {name: _resized(name, spec, largest, bugs) for name, spec in layers.items()}


def _resized(name: str, spec: LayerSpec, page: int, bugs: frozenset[str]) -> LayerSpec:
    own = spec.page_size_bytes
    if own == page:
        return spec
    if spec.snapshot:
        return dataclasses.replace(spec, page_size_padded=page)  # type: ignore[call-arg]
    if page % own == 0:
        return _scaled(name, spec, page, page // own, bugs)
    if not is_latent(spec):
        _check_alignment(name, spec, page, bugs)
        return dataclasses.replace(spec, page_size_padded=page)
    raise PagesDiffer(name, own, f"a divisor of the largest page of {page} bytes, as latent pages are not padded")


def _check_alignment(name: str, spec: LayerSpec, page: int, bugs: frozenset[str]) -> None:
    """Raise unless a page may be padded to `page` bytes; vLLM looks at the page's own size instead."""
    alignment = getattr(spec, "alignment", None) or 1
    looked_at = spec.unpadded_page_size_bytes if "stale-page-padding" in bugs else page
    if looked_at % alignment:
        raise PlanError(name, looked_at, f"a multiple of its alignment of {alignment} bytes, to be padded to {page}")


def _scaled(name: str, spec: LayerSpec, page: int, ratio: int, bugs: frozenset[str]) -> LayerSpec:
    padded = getattr(spec, "page_size_padded", None)
    if padded is None:
        return dataclasses.replace(spec, block_size=spec.block_size * ratio)
    if "stale-page-padding" in bugs:
        return _with_stale_padding(name, spec, page, ratio)
    return dataclasses.replace(spec, block_size=spec.block_size * ratio, page_size_padded=page)  # type: ignore[call-arg]


def _with_stale_padding(name: str, spec: LayerSpec, page: int, ratio: int) -> LayerSpec:
    try:
        scaled = dataclasses.replace(spec, block_size=spec.block_size * ratio)
    except HKVError as error:
        raise PlanError(name, spec.page_size_bytes, f"a page of {page} bytes ({error})") from None
    if scaled.page_size_bytes != page:
        raise PlanError(name, scaled.page_size_bytes, f"a page of {page} bytes: its old padding was kept")
    return scaled


def align_states(
    layers: Mapping[str, LayerSpec], *, kernel_block_size: int, mamba_mode: str, max_model_len: int
) -> dict[str, LayerSpec]:
    """Attention blocks long enough to hold a recurrent state, states padded to them (vLLM 0.33 hybrid alignment).

    Without it a 16-token block would be padded to the size of a state. The attention block becomes the smallest
    multiple of `kernel_block_size` (at least 128 tokens next to latent layers) whose page holds the largest state;
    states that are kept inside chunks, at places of their own alignment, make it a multiple of that too. In mode
    `align` there is a state at each block boundary, in mode `none` one a request, for `max_model_len` tokens.
    """
    states = [spec for spec in layers.values() if spec.snapshot]
    tokens = [spec for spec in layers.values() if attention_of(spec) and not spec.is_draft]
    if not states:
        return dict(layers)
    grid = math.lcm(*(kinds.layer(spec).checkpoint_alignment for spec in states)) if mamba_mode == "align" else 1
    if not tokens:
        size = math.lcm(grid, min(spec.block_size for spec in states)) if mamba_mode == "align" else max_model_len
        return {name: kinds.layer(spec).spanning(size, None) for name, spec in layers.items()}
    if any(is_latent(spec) for spec in tokens):
        kernel_block_size = max(kernel_block_size, 128)
    unit = math.lcm(max(kernel_block_size, *(spec.block_size for spec in tokens)), grid)
    largest = max(spec.unpadded_page_size_bytes for spec in states)
    multiples = range(1, 1 + -(-largest // unit))

    def smallest_page(count: int) -> int:
        return min(spec.with_block_size(unit * count).page_size_bytes for spec in tokens)

    block = unit * (1 + bisect.bisect_left(multiples, largest, key=smallest_page))
    resized = {name: spec.with_block_size(block) if attention_of(spec) else spec for name, spec in layers.items()}
    page = max(spec.with_block_size(block).page_size_bytes for spec in tokens)
    span = block if mamba_mode == "align" else max_model_len
    return {
        name: kinds.layer(spec).spanning(span, page if page > spec.unpadded_page_size_bytes else None)
        for name, spec in resized.items()
    }


# The two block sizes of the scheduler: to what lengths hits are aligned, and at what lengths prefixes are hashed.


def resolve_block_sizes(groups: Sequence[PlannedGroup], options: PlanOptions) -> tuple[int, int]:
    """`(scheduler_block_size, hash_block_size)` in tokens (vLLM 0.33 `resolve_kv_cache_block_sizes`)."""
    ranks = options.limits.context_parallel
    sizes = [manager_block(group.spec, ranks) for group in groups]
    if len(groups) == 1:
        if options.caching and options.prefix_match_unit not in (None, sizes[0]):
            expected = f"{sizes[0]}, the block of the only group"
            raise PlanError("prefix_match_unit", options.prefix_match_unit, expected)
        return sizes[0], sizes[0]
    scheduler = math.lcm(*sizes)
    specs = [spec for group in groups for spec in group.specs or (group.spec,)]
    if not options.caching or (options.limits.mamba_mode != "align" and any(s.snapshot for s in specs)):
        return scheduler, scheduler
    hashed = [size for size, group in zip(sizes, groups, strict=True) if group.prefix_cacheable] or sizes
    unit = options.prefix_match_unit or math.gcd(*hashed)
    if any(size % unit for size in hashed):
        raise PlanError("prefix_match_unit", unit, f"a divisor of the groups' blocks {hashed}")
    _check_compression(specs, unit if has_partial_hits(specs, unit, ranks) else scheduler)
    return scheduler, unit


def has_partial_hits(specs: Sequence[LayerSpec], unit: int, context_parallel: int) -> bool:
    """True if states inside a block may be hit (vLLM 0.33 `partial_hash_hits_enabled`, Mamba mode `align`)."""
    return any(
        spec.snapshot and (spec.block_size > unit or (context_parallel > 1 and spec.block_size == unit))
        for spec in specs
    )


def _check_compression(specs: Sequence[LayerSpec], alignment: int) -> None:
    for spec in specs:
        tokens = getattr(spec, "tokens_per_state", 1)
        if spec.prefix_cacheable and isinstance(tokens, int) and tokens > 1 and alignment % tokens:
            expected = f"hits at multiples of {tokens} tokens, which share a state; they are {alignment} tokens apart"
            raise PlanError("prefix_match_unit", alignment, expected)


# Groups of mixed pages, packed side by side within each block; for layouts that put blocks outermost.


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Layers of one type, by name."""

    layers: dict[str, LayerSpec]

    @property
    def columns(self) -> dict[int, list[str]]:
        """Layer names by page size, sizes in order of first appearance."""
        columns: dict[int, list[str]] = {}
        for name, spec in self.layers.items():
            columns.setdefault(spec.page_size_bytes, []).append(name)
        return columns

    @property
    def balanced(self) -> bool:
        """True if every page size has the same number of layers, so that the bucket is a repeated pattern."""
        return len({len(names) for names in self.columns.values()}) == 1

    @property
    def repeats(self) -> int:
        """Layers of the most frequent page size."""
        return max(len(names) for names in self.columns.values())

    def widest(self, groups: int) -> int:
        """Bytes of the widest of `groups` groups."""
        return sum(-(-len(names) // groups) * page for page, names in self.columns.items())


def packed_groups(layers: Mapping[str, LayerSpec], order: Order, bugs: frozenset[str]) -> list[PlannedGroup] | None:
    """Groups that pack pages of several sizes into blocks, or None where neither layout nor pages call for it.

    vLLM 0.33 `_get_packed_kv_cache_groups`: layers of one type share a bucket; buckets that repeat a pattern
    are cut into groups of about the same number of repeats; states are cut so that they fit a block others need anyway.
    """
    if not order.block_outermost or len({spec.page_size_bytes for spec in layers.values()}) <= 1:
        return None
    buckets = _buckets(layers)
    repeats = _repeats_per_group(buckets)
    anchor = max(
        bucket.widest(len(bucket.layers) if _is_state(bucket, repeats) else _groups_of(bucket, repeats))
        for bucket in buckets
    )
    groups: list[PlannedGroup] = []
    for bucket in buckets:
        count = _groups_of(bucket, repeats)
        if _is_state(bucket, repeats):
            first = next(iter(bucket.layers.values()))
            count = max(count, -(-len(bucket.layers) // max(anchor // first.page_size_bytes, 1)))
        groups.extend(_split(bucket, count, bugs))
    return groups


def _buckets(layers: Mapping[str, LayerSpec]) -> list[Bucket]:
    buckets: list[Bucket] = []
    for name, spec in layers.items():
        for bucket in buckets:
            if kinds.is_uniform_type([*bucket.layers.values(), spec]):
                bucket.layers[name] = spec
                break
        else:
            buckets.append(Bucket({name: spec}))
    return buckets


def _repeats_per_group(buckets: Sequence[Bucket]) -> int | None:
    """Repeats of its pattern that a group of a balanced bucket covers; None when no bucket mixes page sizes evenly."""
    balanced = [bucket for bucket in buckets if bucket.balanced]
    floor = max((bucket.repeats for bucket in balanced if len(bucket.columns) > 1), default=0)
    return approximate_gcd([bucket.repeats for bucket in balanced], floor) if floor else None


def approximate_gcd(values: Sequence[int], at_least: int = 1) -> int:
    """The number that divides `values` with the least rounding up in all; the larger one on a tie."""
    candidates = range(max(1, at_least), max(values) + 1)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d), default=max(1, at_least))


def _groups_of(bucket: Bucket, repeats: int | None) -> int:
    return -(-bucket.repeats // repeats) if bucket.balanced and repeats is not None else 1


def _is_state(bucket: Bucket, repeats: int | None) -> bool:
    """True if the bucket may be cut down to one layer a group: states, and windows where nothing else sets a size."""
    first = next(iter(bucket.layers.values()))
    return first.snapshot or first.one_block or (repeats is None and first.slides)


def _split(bucket: Bucket, count: int, bugs: frozenset[str]) -> list[PlannedGroup]:
    if count == 1:
        return [PlannedGroup.of_type(bucket.layers)]
    columns = list(bucket.columns.values())
    if bucket.balanced and count <= bucket.repeats:
        dealt = [[name for row in list(zip(*columns, strict=True))[i::count] for name in row] for i in range(count)]
    elif "packed-split-loses-layers" in bugs:
        expected = f"layers of each page size in equal number, {count} of each or more"
        raise PlanError("layers", [len(names) for names in columns], expected)
    else:
        names = [name for column in columns for name in column]
        dealt = [names[i::count] for i in range(count)]
    return [PlannedGroup.of_type({name: bucket.layers[name] for name in names}) for names in dealt]
