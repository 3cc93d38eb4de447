"""Hits of drawn caches beside their definition, for groups of any kinds."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.traffic.hit_comparison import Case, causes, make_config
from hkv.spec import LayerSpec


def assert_hits_are_defined(specs: Sequence[LayerSpec], size: int, choices: RandomChoices) -> None:
    """Draws sixty caches and prompts; where the iteration leaves the definition, a named cause has to apply.

    Args:
      specs: one of each group.
      size: tokens of the smallest block.
      choices: where draws come from.
    """
    config = make_config(specs, [0] if choices.chance(40) else [], size, 0, 1)
    differ = set()
    for _ in range(60):
        tokens = choices.integer(1, 14 * size)
        entries = {
            (group, end)
            for group, spec in enumerate(specs)
            for end in range(spec.block_size, tokens + 4 * size, spec.block_size)
            if choices.chance(80)
        }
        case = Case(config, tokens, frozenset(entries))
        if case.by_iteration() != case.by_definition():
            differ |= causes(config, tokens) or {"unexplained"}
    assert "unexplained" not in differ
