"""Every mutant, section by section."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from hkv.testing.mutants import (
    admission,
    events,
    eviction,
    hashing,
    hit_length,
    kernel_split,
    layouts,
    null_block,
    partial_blocks,
    planning,
    preemption,
    recurrent_state,
    rtp_llm,
    speculation,
    tiers,
    transfers,
    windows,
)
from hkv.testing.mutants.mutant import Mutant

SECTIONS = MappingProxyType(
    {
        "hit-length": hit_length.MUTANTS,
        "eviction": eviction.MUTANTS,
        "null-block": null_block.MUTANTS,
        "windows": windows.MUTANTS,
        "recurrent-state": recurrent_state.MUTANTS,
        "hashing": hashing.MUTANTS,
        "partial-blocks": partial_blocks.MUTANTS,
        "admission": admission.MUTANTS,
        "preemption": preemption.MUTANTS,
        "speculation": speculation.MUTANTS,
        "events": events.MUTANTS,
        "layouts": layouts.MUTANTS,
        "kernel-split": kernel_split.MUTANTS,
        "planning": planning.MUTANTS,
        "transfers": transfers.MUTANTS,
        "tiers": tiers.MUTANTS,
        "rtp-llm": rtp_llm.MUTANTS,
    }
)
"""The kinds of bugs, and the mutants of each."""

MUTANTS: dict[str, Mutant] = {
    mutant.name: dataclasses.replace(mutant, section=section)
    for section, mutants in SECTIONS.items()
    for mutant in mutants
}
"""Every mutant, by name."""
