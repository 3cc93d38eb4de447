"""One page size for layers of different sizes: larger blocks where that works out, padding where it does not."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

from hkv.errors import HKVError, PlanError
from hkv.spec import LayerSpec


class PagesDiffer(PlanError):  # noqa: N818
    """The pages of these layers cannot be made equal."""


def unify_pages(layers: Mapping[str, LayerSpec], bugs: frozenset[str]) -> dict[str, LayerSpec]:
    """The same layers with pages of one size (vLLM 0.33 `unify_kv_cache_spec_page_size`).

    The largest page stands. A recurrent state is padded to it, whatever its block size; a page that divides it gets
    that many times the tokens; any other attention page but a latent one is padded.

    Args:
      layers: the layers by name.
      bugs: names of upstream defects to reproduce.

    Raises:
      PagesDiffer: a latent page neither divides the largest page nor may be padded to it.
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
    if not spec.latent:
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
    states that are kept inside chunks, at places of their own alignment, make it a multiple of that too.

    Args:
      layers: the layers by name; returned as they are unless both attention and recurrent states are among them.
      kernel_block_size: tokens of which attention blocks are multiples.
      mamba_mode: `align` keeps a state at each block boundary, `none` one a request.
      max_model_len: tokens that one state stands for in mode `none`.
    """
    states = [spec for spec in layers.values() if spec.snapshot]
    tokens = [spec for spec in layers.values() if spec.attends and not spec.is_draft]
    if not states:
        return dict(layers)
    grid = math.lcm(*(spec.checkpoint_alignment for spec in states)) if mamba_mode == "align" else 1
    if not tokens:
        size = math.lcm(grid, min(spec.block_size for spec in states)) if mamba_mode == "align" else max_model_len
        return {name: spec.spanning(size, None) for name, spec in layers.items()}
    if any(spec.latent for spec in tokens):
        kernel_block_size = max(kernel_block_size, 128)
    unit = math.lcm(max(kernel_block_size, *(spec.block_size for spec in tokens)), grid)
    largest = max(spec.unpadded_page_size_bytes for spec in states)
    multiples = range(1, 1 + -(-largest // unit))
    block = unit * (1 + bisect.bisect_left(multiples, largest, key=lambda count: _smallest_page(tokens, unit * count)))
    resized = {name: spec.with_block_size(block) if spec.attends else spec for name, spec in layers.items()}
    page = max(spec.with_block_size(block).page_size_bytes for spec in tokens)
    span = block if mamba_mode == "align" else max_model_len
    return {
        name: spec.spanning(span, page if page > spec.unpadded_page_size_bytes else None)
        for name, spec in resized.items()
    }


def _smallest_page(specs: Sequence[LayerSpec], block_size: int) -> int:
    return min(spec.with_block_size(block_size).page_size_bytes for spec in specs)
