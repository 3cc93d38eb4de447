"""A request's bytes on each rank of a server, from those of one rank that holds all of it: heads and slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hkv.layout.views import numpy as numpy_views
from hkv.model.group_policy import GroupType

Pools = Sequence[np.ndarray]
Lists = Mapping[str, Sequence[int]]


def owned(heads: int, ranks: int, rank: int) -> slice:
    """Heads of a rank by RTP-LLM's rule: a share each, or one of `gcd` shares, ranks in a row alike."""
    shares = ranks if heads % ranks == 0 else math.gcd(heads, ranks)
    share = rank * shares // ranks if ranks > 1 else 0  # ranks that deal blocks out hold all heads
    return slice(share * heads // shares, (share + 1) * heads // shares)


class Whole:
    """A model on one rank that holds everything, a request's blocks there, and their content.

    Args:
      server: that rank; behind prefill ranks that deal blocks out, a decode server.
      pools: its pools, uint8 `[size]` each.
      lists: the request's blocks, by the groups' tags; -1 for holes.
      tokens: of the request.
    """

    def __init__(self, server: Any, pools: Pools, lists: Lists, tokens: int) -> None:
        self.server, self.pools, self.lists = server, pools, lists
        self.keys = -(-tokens // server.block_size)

    def share(self, server: Any, pools: Pools, lists: Lists, rank: int, least: int = 0) -> None:
        """Writes what a rank of a server holds of the request, full groups' blocks from key `least` on."""
        for group, mine in zip(self.server.groups, server.groups, strict=True):
            for slot, block in enumerate(self.lists[group.tag]):
                key = self._key(group, slot)
                full = group.policy.group_type is GroupType.FULL
                dealt = full and server.options.ranks > 1
                if block == -1 or (full and key < least) or (dealt and key % server.options.ranks != rank):
                    continue
                there = lists[group.tag][slot // server.options.ranks if dealt else slot]
                for layer, other in zip(group.layers, mine.layers, strict=True):
                    self._share_block(server, mine, pools, (layer, block), (other, there), rank)

    def _key(self, group: Any, slot: int) -> int:
        """The last key of a slot: blocks of several ranks' tokens are as many keys long."""
        compact = self.server.options.slicing_ranks if group.block.seq_size > self.server.block_size else 1
        return min((slot + 1) * compact - 1, self.keys - 1)

    def _share_block(
        self, server: Any, group: Any, pools: Pools, here: tuple[int, int], there: tuple[int, int], rank: int
    ) -> None:
        """Copies a rank's share of one layer and block, `here` of the whole, to one of the rank's."""
        ranks = server.options.tensor_parallel
        if group.block.kind in ("mha", "linear"):
            mine = parts_of_block(server.cache, pools, group.tag, *there)
            for name, all_of in parts_of_block(self.server.cache, self.pools, group.tag, *here).items():
                if name == "state":
                    own = all_of[:, :, :, owned(group.block.heads, ranks, rank)]
                elif name == "conv":
                    own = _inputs(all_of, group, ranks, rank)
                else:
                    own = all_of[:, owned(group.block.heads, ranks, rank)]
                mine[name].view(np.uint8)[:] = (
                    np.ascontiguousarray(own).view(np.uint8).reshape(mine[name].view(np.uint8).shape)
                )
            return
        sliced = group.policy.cp_slice.name != "NONE" and server.options.ranks > 1
        pairs = zip(
            raw_block(server.cache, pools, group.tag, *there),
            raw_block(self.server.cache, self.pools, group.tag, *here),
            strict=True,
        )
        for mine, all_of in pairs:
            length = len(mine)
            if sliced and group.policy.cp_slice.name == "PAYLOAD_BYTES":
                length = group.block.payload
            mine[:length] = all_of[rank * length : (rank + 1) * length] if sliced else all_of


def parts_of_block(cache: Any, pools: Pools, tag: str, layer: int, block: int) -> dict[str, np.ndarray]:
    """Views of one block of a layer, `[kernel blocks, heads, states, ...]` by part."""
    found = cache.layer_cache(layer, tag)
    rows = slice(block * found.kernel_blocks, (block + 1) * found.kernel_blocks)
    return {name: numpy_views.view(pools[found.pool], view)[rows] for name, view in found.parts.items()}


def raw_block(cache: Any, pools: Pools, tag: str, layer: int, block: int) -> list[np.ndarray]:
    """Bytes of one block of a layer, and of its scales."""
    home = cache.addresses.home(layer, tag)
    starts = (home.region.kv_address(home.slot, block), home.region.scale_address(home.slot, block))
    sizes = (home.group.stride, home.group.scale_stride)
    return [pools[home.pool][at : at + size] for at, size in zip(starts, sizes, strict=True) if at is not None]


def _inputs(all_of: np.ndarray, group: Any, ranks: int, rank: int) -> np.ndarray:
    """A convolution's last inputs on a rank: its heads of queries, of keys and of values, one behind the other."""
    ((_, size, _), _), _ = group.block.spec.state_tensors
    values = group.block.heads
    keys = (all_of.shape[-1] // size - values) // 2
    heads = all_of.reshape(*all_of.shape[:-1], 2 * keys + values, size)
    queries, rest = heads[..., :keys, :], heads[..., keys:, :]
    own = [queries[..., owned(keys, ranks, rank), :], rest[..., :keys, :][..., owned(keys, ranks, rank), :]]
    own.append(rest[..., keys:, :][..., owned(values, ranks, rank), :])
    return np.concatenate(own, axis=-2).reshape(*all_of.shape[:-1], -1)
