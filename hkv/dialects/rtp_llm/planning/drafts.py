"""Draft (MTP, EAGLE) modules in the pools of their target: which group takes which, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.dialects.rtp_llm.planning.pools import PoolGroup
from hkv.errors import PlanError
from hkv.model.draft_modules import DEFAULT_TAG
from hkv.model.group_policy import GroupType

ATTENTION = ("mha", "mla")


def draft_module(
    target: Sequence[PoolGroup], draft: Sequence[PoolGroup], module: int, num_layers: int
) -> tuple[PoolGroup, ...]:
    """One module's groups: the target's tags in the target's order (RTP-LLM `mergeMTPModule`).

    A draft group joins the target's group of its tag. A sole one of full attention, tagged `default`, joins the one
    target group that is like it in everything. A target group that no draft group joins stays, without layers. Layers
    are numbered on after the target's, module by module.

    Args:
      target: the target's groups.
      draft: the draft's groups, planned like a model of their own.
      module: number of the module, from 0.
      num_layers: layers of the target.

    Raises:
      PlanError: a draft group that no target group takes, or several could; one that lists not all of the module's
        layers; or a target group shorter than the pool, so that places in it would not be places in the pool.
    """
    count = 1 + max(layer for group in draft for layer in group.layers)
    depth = max(len(group.layers) for group in target)
    joining = {_taker(target, draft, group): group for group in draft}
    first = num_layers + module * count
    views = []
    for group in target:
        own = joining.get(group.tag)
        if own is None:
            views.append(dataclasses.replace(group, layers=()))
            continue
        if own.layers != tuple(range(count)):
            raise PlanError(f"layers of draft group {own.tag}", list(own.layers), f"all {count} of the draft, in order")
        if len(group.layers) != depth:
            expected = f"{depth}, as places in the group are to be places in the pool"
            raise PlanError(f"layers of group {group.tag}", len(group.layers), expected)
        layers = tuple(range(first, first + count))
        views.append(dataclasses.replace(own, tag=group.tag, layers=layers, num_blocks=group.num_blocks))
    return tuple(views)


def _taker(target: Sequence[PoolGroup], draft: Sequence[PoolGroup], group: PoolGroup) -> str:
    """The tag of the target's group that a draft group joins."""
    tags = [each.tag for each in target]
    if group.tag in tags:
        mine = target[tags.index(group.tag)]
        if (mine.block.seq_size, mine.kernel_blocks) != (group.block.seq_size, group.kernel_blocks):
            expected = f"{mine.block.seq_size} tokens in {mine.kernel_blocks} kernel blocks, as in the target"
            raise PlanError(f"blocks of draft group {group.tag}", group.block.seq_size, expected)
        return group.tag
    sole = len(draft) == 1 and group.tag == DEFAULT_TAG and group.policy.group_type is GroupType.FULL
    if not sole or group.block.kind not in ATTENTION:
        raise PlanError("draft", group.tag, f"a group of the target's: {', '.join(tags)}")
    fits = [each.tag for each in target if _likeness(each) == _likeness(group)]
    if len(fits) != 1:
        found = f"not several: {', '.join(fits)}" if fits else f"among {', '.join(tags)}"
        raise PlanError("draft", group.tag, f"one group of the target's with the same blocks and policy, {found}")
    return fits[0]


def _likeness(group: PoolGroup) -> tuple[object, ...]:
    block = group.block
    element = block.bytes // max(1, block.elems)
    return group.policy, block.kind, element, block.bytes, block.scale, block.seq_size, group.kernel_blocks
