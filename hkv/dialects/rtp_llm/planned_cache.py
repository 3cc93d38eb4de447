"""A planned cache as one value: from layer descriptions to pools, addresses, and every layer's view. Host-only."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hkv.dialects.rtp_llm.addresses import Addresses, Home
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.pages import Pages, pages_of
from hkv.dialects.rtp_llm.planning import (
    DescribedModel,
    PoolGroup,
    PoolPlan,
    RtpOptions,
    plan_described,
    plan_rtp_llm,
)
from hkv.dialects.rtp_llm.planning.sizes import region_of
from hkv.errors import LayoutError
from hkv.layout.layer_cache import LayerCache, mha_layer, mla_layer, opaque_layer
from hkv.model.group_policy import GroupType
from hkv.model.huggingface import Model
from hkv.model.topology import Group, Topology
from hkv.spec import LayerSpec

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class PlannedCache:
    """RTP-LLM's cache of one server rank: groups, pools and every byte of them.

    Layers are named by their index, those of draft modules by the numbers after the target's; groups by their tags.
    A pool is a flat array of bytes, and every view of it shares its memory.
    """

    plan: PoolPlan

    @classmethod
    def of_model(cls, model: Model, options: RtpOptions, *, memory: int, draft: Model | None = None) -> PlannedCache:
        """The cache of a model that was read from its config, as `plan_rtp_llm` plans it."""
        return cls(plan_rtp_llm(model, memory, options, draft))

    @classmethod
    def of_layers(
        cls,
        model: DescribedModel,
        options: RtpOptions,
        *,
        memory: int | None = None,
        num_blocks: int | None = None,
        draft: DescribedModel | None = None,
    ) -> PlannedCache:
        """The cache of layers that somebody described, as `plan_described` plans it."""
        return cls(plan_described(model, options, memory=memory, num_blocks=num_blocks, draft=draft))

    def config(self, **fields: Any) -> RtpConfig:
        """The configuration of a manager of the cache's blocks, as `config_of_plan` makes it."""
        return config_of_plan(self.plan, **fields)

    @functools.cached_property
    def addresses(self) -> Addresses:
        """Byte ranges of every block."""
        return Addresses(self.plan)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Bytes of each pool: one, or one a group."""
        return self.addresses.pool_sizes()

    def pools(self) -> tuple[np.ndarray, ...]:
        """New pools, uint8 `[size]` each: zeros, and 1.0 for the scales of float8 keys and values (RTP-LLM)."""
        import numpy as np

        made = tuple(np.zeros(size, np.uint8) for size in self.pool_sizes)
        for models in self._models:
            for group in models:
                if group.layers and group.block.kind == "mha" and group.block.dtype == "float8_e4m3fn":
                    home = self.addresses.home(group.layers[0], group.tag)
                    region = made[home.pool][home.region.scale_offset : home.region.end]
                    region.view(np.float32)[:] = 1.0
        return made

    @property
    def _models(self) -> tuple[tuple[PoolGroup, ...], ...]:
        return (self.plan.groups, *self.plan.modules)

    @functools.cached_property
    def pages(self) -> dict[str, tuple[Pages, ...]]:
        """Pages of each group by its tag: of the target's layers, then of each draft module's that has some."""
        found: dict[str, tuple[Pages, ...]] = {}
        for group in (group for models in self._models for group in models if group.layers):
            home = self.addresses.home(group.layers[0], group.tag)
            found[group.tag] = (*found.get(group.tag, ()), pages_of(group, home.region, home.pool))
        return found

    def pages_of(self, layer: int, tag: str | None = None) -> tuple[Pages, int]:
        """The pages in which a layer's blocks lie, and its index among their layers."""
        home = self.addresses.home(layer, tag)
        for pages in self.pages[home.group.tag]:
            if layer in pages.layers:
                return pages, pages.layers.index(layer)
        raise LayoutError("layer", layer, "the index of a layer that some group has")

    def layer_cache(self, layer: int, tag: str | None = None) -> LayerCache:
        """Views of a layer's cache as its kernels take them (RTP-LLM `getLayerCache`).

        Full attention is `[rows, 2, heads, tokens, head size]`, a latent `[rows, tokens, elements]`, compressed keys
        and values `[rows, elements]`, with a row for each kernel block; other groups `[blocks, elements]`. A layer of
        several groups needs a tag; a LayoutError names them.
        """
        home = self.addresses.home(layer, tag)
        pages, index = self.pages_of(layer, home.group.tag)
        parts = {part.name: layout.part_view(part.name, index) for layout in pages.layouts for part in layout.content}
        cache = _view(home)
        scale = cache.scale if home.group.block.scale else None
        return dataclasses.replace(cache, layer=layer, scale=scale, pool=home.pool, parts=parts)

    def layer_cache_groups(self, layer: int) -> tuple[LayerCache, ...]:
        """Views of all of a layer's caches, in the order of the groups (RTP-LLM `getLayerCacheGroups`)."""
        return tuple(self.layer_cache(layer, home.group.tag) for home in self.addresses.homes(layer))


def _view(home: Home) -> LayerCache:
    """The view that the group's type and the layer's kind ask for."""
    group, block = home.group, home.group.block
    common: dict[str, Any] = {"tag": group.tag, "dtype": block.dtype, "tokens": block.seq_size}
    kernel_tokens = block.seq_size // group.kernel_blocks
    if group.policy.group_type is not GroupType.FULL or block.kind in ("linear", "opaque_state"):
        scale_dtype = "float32" if block.kind == "mha" else "uint8"
        return opaque_layer(home.region, home.slot, **common, kernel_tokens=block.seq_size, scale_dtype=scale_dtype)
    if block.kind == "mla":
        return mla_layer(home.region, home.slot, **common, kernel_tokens=kernel_tokens)
    if block.kind == "opaque_kv":
        return opaque_layer(home.region, home.slot, **common, kernel_tokens=kernel_tokens)
    heads = block.local_heads
    size = block.k_elems // (heads * block.seq_size)
    return mha_layer(home.region, home.slot, **common, kernel_tokens=kernel_tokens, heads=heads, head_size=size)


# The configuration of a manager of the cache's blocks.


def config_of_plan(plan: PoolPlan, **fields: Any) -> RtpConfig:
    """The configuration of a cache in a plan's pools, with further fields; layers are `layers.0`, `layers.1`, ...."""
    groups = tuple(
        Group(
            tag=group.tag,
            spec=_spec(group),
            layers=tuple(f"layers.{index}" for index in group.layers),
            policy=group.policy,
            kernel_block_size=group.block.seq_size // group.kernel_blocks,
        )
        for group in plan.groups
    )
    topology = Topology(groups, pools="shared" if plan.shared else "independent")
    counts = (plan.num_blocks,) if plan.shared else tuple(group.num_blocks for group in plan.groups)
    ranks = {"cp_size": plan.ranks, "prefill_cp_size": plan.prefill_ranks}
    return RtpConfig(topology=topology, num_blocks=counts, **{**ranks, **fields})


def _spec(group: PoolGroup) -> LayerSpec:
    """The group's layer, with the bytes of a whole block where its size is that of a kernel block."""
    spec, region = group.block.spec, region_of(group.block.spec)
    return spec if region is None or not group.block.entries else dataclasses.replace(region, page_bytes=group.stride)
