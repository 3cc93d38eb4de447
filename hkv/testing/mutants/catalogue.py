"""Every mutant, section by section."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from hkv.testing.mutants import eviction, hit_length, null_block, recurrent_state, windows
from hkv.testing.mutants.mutant import Mutant

SECTIONS = MappingProxyType(
    {
        "hit-length": hit_length.MUTANTS,
        "eviction": eviction.MUTANTS,
        "null-block": null_block.MUTANTS,
        "windows": windows.MUTANTS,
        "recurrent-state": recurrent_state.MUTANTS,
    }
)
"""The kinds of bugs, and the mutants of each."""

MUTANTS: dict[str, Mutant] = {
    mutant.name: dataclasses.replace(mutant, section=section)
    for section, mutants in SECTIONS.items()
    for mutant in mutants
}
"""Every mutant, by name."""
