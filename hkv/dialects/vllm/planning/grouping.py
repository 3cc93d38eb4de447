"""Grouping of layers: the order in which vLLM 0.33 tries its ways of grouping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.pages import PagesDiffer, packed_groups, unify_pages
from hkv.dialects.vllm.planning.plan import PlannedGroup, PlanOptions
from hkv.errors import PlanError
from hkv.layout.orders import Order
from hkv.model.huggingface import Model
from hkv.spec import LayerSpec, MergeError, caches_latents, is_latent


def group_layers(layers: Mapping[str, LayerSpec], order: Order, options: PlanOptions) -> list[PlannedGroup]:
    """The groups of a whole model (vLLM 0.33 `get_global_kv_cache_groups` with the default builder)."""
    if not layers:
        return []
    extra = max(0, options.prefill_lookahead - 1)
    stamped = {name: kinds.layer(spec).keeping(extra) for name, spec in layers.items()}
    groups = _default_groups(stamped, order, options)
    if options.eagle:
        drafts = {name for name, spec in layers.items() if spec.is_draft}
        groups = [dataclasses.replace(group, eagle=not drafts.isdisjoint(group.names)) for group in groups]
    return groups


def _default_groups(layers: dict[str, LayerSpec], order: Order, options: PlanOptions) -> list[PlannedGroup]:
    bugs = options.bugs
    if not options.hybrid:
        layers = promote_everything(layers, bugs)
    merged = merge_all(layers, bugs)
    if merged is not None:
        return [PlannedGroup.merged(list(layers), merged)]
    if kinds.is_uniform_type(list(layers.values())):
        return [PlannedGroup.of_type(layers)]
    hidden = {name: spec for name, spec in layers.items() if kinds.layer(spec).stands_alone}
    rest = {name: spec for name, spec in layers.items() if name not in hidden}
    if not rest:
        raise PlanError("layers", sorted(hidden), "attention or state layers beside hidden states")
    if packed := packed_groups(rest, order, bugs):
        return [*packed, *(PlannedGroup.merged([name], spec) for name, spec in hidden.items())]
    try:
        unified = unify_pages(rest, bugs)
    except PagesDiffer:
        fallback = full_allocation(layers, bugs)
        if fallback is None:
            raise
        return [fallback]
    return add_hidden_states(group_by_spec(unified, bugs), hidden, bugs)


# Groups of equal page size: layers of one spec dealt out into groups of about the same number of layers.


def group_by_spec(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> list[PlannedGroup]:
    """Groups of layers whose pages are all of one size (vLLM 0.33 `_get_kv_cache_groups_uniform_page_size`).

    Layers whose specs merge share a bucket. Groups are as large as the smallest bucket, or as the largest where that is
    less than one and a half times the smallest. Layers are dealt out in turn, so that every pipeline stage gets its
    share of every group.
    """
    buckets = _buckets(layers, bugs)
    sizes = [len(names) for names, _ in buckets]
    smallest, largest = min(sizes), max(sizes)
    group_size = largest if 2 * largest < 3 * smallest else smallest
    groups = []
    for names, _ in buckets:
        count = -(-len(names) // group_size)
        for index in range(count):
            members = names[index::count]
            specs = [layers[name] for name in members]
            groups.append(PlannedGroup.merged(members, kinds.layer_class(type(specs[0])).merge(specs, bugs)))
    return groups


def _buckets(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> list[tuple[list[str], list[LayerSpec]]]:
    """Layer names and distinct specs of each bucket, in order of first appearance."""
    equal: dict[LayerSpec, list[str]] = {}
    for name, spec in layers.items():
        equal.setdefault(spec, []).append(name)
    buckets: list[tuple[list[str], list[LayerSpec]]] = []
    for spec, names in equal.items():
        for bucket_names, bucket_specs in buckets:
            try:
                kinds.layer_class(type(bucket_specs[0])).merge([*bucket_specs, spec], bugs)
            except MergeError:
                continue
            bucket_names.extend(names)
            bucket_specs.append(spec)
            break
        else:
            buckets.append((list(names), [spec]))
    return buckets


# First and last layers that keep the model's own element type where the others are packed (vLLM 0.33 TurboQuant).

KEPT = 2
"""Layers kept at either end of a model without recurrent states (vLLM 0.33 `get_boundary_skip_layers`)."""

KERNEL_BLOCK = 16
"""Tokens of the smallest block that kernels of either kind take."""


def keeps_layers(model: Model, kv_cache_dtype: str) -> bool:
    """True if some layers of the model keep their own element type under this packing."""
    return kv_cache_dtype.startswith("turboquant_") and not any(spec.snapshot for spec in model.specs.values())


def common_block_size(model: Model, block_size: int | None) -> int:
    """Tokens per block with which a page of packed layers is no smaller than a kept layer's smallest.

    vLLM 0.33 `_align_heterogeneous_kv_block_size`. It asks the first layer's kernels for the packed bytes of a token,
    and those know only one byte an element.
    """
    unit = max(KERNEL_BLOCK, block_size or KERNEL_BLOCK)
    first = model.attention_specs[0]
    elements = first.num_kv_heads * (first.head_size + first.value_size)
    kept = KERNEL_BLOCK * first.num_heads * first.content_bytes
    return max(unit, unit * -(-kept // (unit * elements)))


def with_kept_layers(packed: Model, own: Model) -> Model:
    """The packed model with its first and last layers as in `own`."""
    kept = min(KEPT, packed.num_layers // 2)
    middle = range(kept, packed.num_layers - kept)
    pairs = zip(packed.layers, own.layers, strict=True)
    return dataclasses.replace(packed, layers=tuple(a if a.index in middle else b for a, b in pairs))


# Hidden-state layers: each a group of its own, its page cut to the page that all groups share.


def add_hidden_states(
    groups: Sequence[PlannedGroup], hidden: Mapping[str, LayerSpec], bugs: frozenset[str]
) -> list[PlannedGroup]:
    """The groups, large enough for one token's hidden state, and one more group for each hidden-state layer.

    A hidden-state layer takes as many tokens a block as fit the common page and divide every group's block (vLLM 0.33,
    `get_kv_cache_groups` and `_ensure_min_page_size`). Where the page has to grow, the distance between recurrent
    states grows with the attention blocks, so that the ratio of the groups' blocks stays what it was.
    """
    if not hidden:
        return list(groups)
    page = groups[0].spec.page_size_bytes
    largest = max(kinds.layer(spec).bytes_per_token for spec in hidden.values())
    if largest > page:
        scale = -(-largest // page)
        page *= scale
        groups = [_scaled(group, scale, page, bugs) for group in groups]
    block = math.gcd(*(group.spec.block_size for group in groups))
    own = []
    for name, spec in hidden.items():
        most = min(block, max(page // kinds.layer(spec).bytes_per_token, 1))
        tokens = next(count for count in range(most, 0, -1) if block % count == 0)
        own.append(PlannedGroup.merged([name], dataclasses.replace(spec, block_size=tokens, page_size_padded=page)))
    return [*groups, *own]


def _scaled(group: PlannedGroup, scale: int, page: int, bugs: frozenset[str]) -> PlannedGroup:
    spec: LayerSpec = group.spec
    padded = getattr(spec, "page_size_padded", None)
    changes = {"block_size": spec.block_size * scale}
    if padded is not None:
        changes["page_size_padded"] = padded * scale
    elif spec.snapshot and "stale-page-padding" not in bugs:
        changes["page_size_padded"] = page
    return PlannedGroup.merged(list(group.names), dataclasses.replace(spec, **changes))


# Local layers that are cached like full attention: blocks for every token, none given back.


def merge_all(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> LayerSpec | None:
    """The one spec of all layers, or None if they do not merge (vLLM 0.33 `is_kv_cache_spec_uniform`)."""
    specs = list(layers.values())
    try:
        return kinds.layer_class(type(specs[0])).merge(specs, bugs)
    except MergeError as error:
        if "window-sizes-abort-grouping" in bugs and error.argument in ("sliding_window", "attention_chunk_size"):
            raise PlanError(error.argument, error.value, error.expected) from error
        return None


def promote(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> dict[str, LayerSpec]:
    """Window and chunked layers turned into full attention (vLLM 0.33 `_promote_local_kv_cache_specs`).

    Nothing is done to layers that are of one type already, or where no layer caches everything.
    """
    promoted = dict(layers)
    if _one_type(promoted, bugs):
        return promoted
    full = {spec.block_size for spec in layers.values() if spec.reads_all}
    if full:
        block_size = full.pop() if len(full) == 1 else None
        for name, spec in layers.items():
            if (whole := kinds.layer(spec).as_full(block_size or spec.block_size)) is not None:
                if caches_latents(spec) and "latent-window-promotion" in bugs:
                    raise PlanError(name, spec, "no latent window layer, which vLLM cannot rebuild as a latent one")
                promoted[name] = whole
    if not _one_type(promoted, bugs):
        found = sorted({type(spec).__name__ for spec in promoted.values()})
        raise PlanError("layers", found, "layers that can all be cached like full attention")
    return promoted


def _one_type(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> bool:
    return merge_all(layers, bugs) is not None or kinds.is_uniform_type(list(layers.values()))


def promote_everything(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> dict[str, LayerSpec]:
    """All local layers promoted, those that context parallelism replicates apart (vLLM 0.33, hybrid manager off)."""
    changed = dict(layers)
    for replicated in (False, True):
        part = {n: spec for n, spec in layers.items() if (spec.snapshot or spec.shared_by_ranks) != replicated}
        if part:
            changed.update(promote(part, bugs))
    return changed


def full_allocation(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> PlannedGroup | None:
    """One group for latent layers next to plain windows whose pages do not go together, or None where that is no help.

    The last resort of vLLM 0.33 (`_try_get_full_allocation_fallback_groups`).
    """
    specs = layers.values()
    joined = all(kinds.layer(spec).joins_latent for spec in specs)
    if not (joined and any(is_latent(spec) for spec in specs) and any(spec.slides for spec in specs)):
        return None
    try:
        promoted = promote(layers, bugs)
    except PlanError:
        return None
    return PlannedGroup.of_type(promoted) if kinds.is_uniform_type(list(promoted.values())) else None
