"""Local layers that are cached like full attention: blocks for every token, none given back."""

from __future__ import annotations

from collections.abc import Mapping

from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.errors import PlanError
from hkv.spec import LayerSpec, MergeError, is_uniform_type


def merge_all(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> LayerSpec | None:
    """The one spec of all layers, or None if they do not merge (vLLM 0.33 `is_kv_cache_spec_uniform`).

    Raises:
      PlanError: only under the defect `window-sizes-abort-grouping`.
    """
    specs = list(layers.values())
    try:
        return type(specs[0]).merge(specs, bugs)
    except MergeError as error:
        if "window-sizes-abort-grouping" in bugs and error.argument in ("sliding_window", "attention_chunk_size"):
            raise PlanError(error.argument, error.value, error.expected) from error
        return None


def promote(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> dict[str, LayerSpec]:
    """Window and chunked layers turned into full attention (vLLM 0.33 `_promote_local_kv_cache_specs`).

    Nothing is done to layers that are of one type already, or where no layer caches everything.

    Raises:
      PlanError: the result is still not of one type.
    """
    promoted = dict(layers)
    if _one_type(promoted, bugs):
        return promoted
    full = {spec.block_size for spec in layers.values() if spec.reads_all}
    if full:
        block_size = full.pop() if len(full) == 1 else None
        for name, spec in layers.items():
            if (whole := spec.as_full(block_size or spec.block_size)) is not None:
                if spec.single_vector and "latent-window-promotion" in bugs:
                    raise PlanError(name, spec, "no latent window layer, which vLLM cannot rebuild as a latent one")
                promoted[name] = whole
    if not _one_type(promoted, bugs):
        kinds = sorted({type(spec).__name__ for spec in promoted.values()})
        raise PlanError("layers", kinds, "layers that can all be cached like full attention")
    return promoted


def _one_type(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> bool:
    return merge_all(layers, bugs) is not None or is_uniform_type(list(layers.values()))


def promote_everything(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> dict[str, LayerSpec]:
    """All local layers promoted, those that context parallelism replicates apart (vLLM 0.33, hybrid manager off).

    Raises:
      PlanError: the layers of one part cannot all be cached like full attention.
    """
    changed = dict(layers)
    for replicated in (False, True):
        part = {name: spec for name, spec in layers.items() if _is_replicated(spec) == replicated}
        if part:
            changed.update(promote(part, bugs))
    return changed


def _is_replicated(spec: LayerSpec) -> bool:
    return not (spec.snapshot or spec.shared_by_ranks)


def full_allocation(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> PlannedGroup | None:
    """One group for latent layers beside plain windows whose pages do not go together, or None where that is no help.

    The last resort of vLLM 0.33 (`_try_get_full_allocation_fallback_groups`).
    """
    specs = layers.values()
    if any(not spec.joins_latent for spec in specs):
        return None
    if not any(spec.latent for spec in specs):
        return None
    if not any(spec.slides for spec in specs):
        return None
    try:
        promoted = promote(layers, bugs)
    except PlanError:
        return None
    return PlannedGroup.of_type(promoted) if is_uniform_type(list(promoted.values())) else None
