"""Hidden-state layers: each a group of its own, its page cut to the page that all groups share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.spec import LayerSpec


def add_hidden_states(
    groups: Sequence[PlannedGroup], hidden: Mapping[str, LayerSpec], bugs: frozenset[str]
) -> list[PlannedGroup]:
    """The groups, large enough for one token's hidden state, and one more group for each hidden-state layer.

    A hidden-state layer takes as many tokens a block as fit the common page and divide every group's block (vLLM 0.33,
    `get_kv_cache_groups` and `_ensure_min_page_size`). Where the page has to grow, the distance between recurrent
    states grows with the attention blocks, so that the ratio of the groups' blocks stays what it was.

    Args:
      groups: groups whose pages are all of one size.
      hidden: the hidden-state layers by name.
      bugs: names of upstream defects to reproduce.
    """
    if not hidden:
        return list(groups)
    page = groups[0].spec.page_size_bytes
    largest = max(spec.bytes_per_token for spec in hidden.values())
    if largest > page:
        scale = -(-largest // page)
        page *= scale
        groups = [_scaled(group, scale, page, bugs) for group in groups]
    block = math.gcd(*(group.spec.block_size for group in groups))
    own = []
    for name, spec in hidden.items():
        tokens = largest_divisor(block, max(page // spec.bytes_per_token, 1))
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


def largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` that is at most `limit`; 1 if none is."""
    return next((candidate for candidate in range(min(value, limit), 0, -1) if value % candidate == 0), 1)
