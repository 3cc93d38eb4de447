"""Origins and targets of mutants: an honest count."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.mutants.row import Planted

PUBLIC = re.compile(r"([\w.-]+/)?[\w.-]+(#\d+|@[0-9a-f]{7,40})")
"""An id that anybody can look up: `vllm#33775`, a report or a change; `rtp-llm@04e47d7b1`, a commit."""

TARGETS = {
    "reference": "the reference",
    "host": "host code of `hkv`",
    "compiled": "the compiled cache",
    "state": "its mechanisms (`hkv.state`)",
    "step": "whole steps",
    "paged": "paged bytes",
    "kernels": "kernels",
}
"""Code that may be edited, and its names in tables."""

STEPS = tuple(
    f"hkv.cache.{name}"
    for name in ("step", "queries", "blocks", "registration", "arrivals", "conversion", "token_hashing", "spans")
)

_PACKAGES = (
    ("reference", "reference"),
    ("pallas_kernels", "kernels"),
    ("hkv.state", "state"),
    ("hkv.paged", "paged"),
    ("hkv.layout.views.runs", "paged"),
)


class Provenance(NamedTuple):
    """A count of mutants, of distinct ids that anybody can look up, and of names of this project's own (`slugs`), for
    behaviour that no public report is known of; `targets` is how many edit each of `TARGETS`.
    """

    mutants: int
    public: int
    slugs: int
    only_slugs: int
    targets: dict[str, int]


def is_public(id: str) -> bool:
    """True if an id names a report, a change or a commit, and is not a name given here."""
    return PUBLIC.fullmatch(id) is not None


def target_of(mutant: Planted) -> str:
    """Target, of `TARGETS`, that a mutant edits first."""
    name = mutant.edits[0].target.split(":")[0]
    for package, target in _PACKAGES:
        if name == package or name.startswith(f"{package}."):
            return target
    if name.startswith(STEPS):
        return "step"
    # Configurations and other host-only rules live next to the compiled ones.
    return "compiled" if name.startswith("hkv.dialects.") and hasattr(importlib.import_module(name), "jnp") else "host"


def by_target(mutants: Sequence[Planted]) -> dict[str, int]:
    """Number of mutants that edit each of `TARGETS`."""
    planted = [target_of(mutant) for mutant in mutants]
    return {target: planted.count(target) for target in TARGETS}


def count(mutants: Sequence[Planted]) -> Provenance:
    """The count of some mutants."""
    ids = {id for mutant in mutants for id in mutant.upstream}
    public = {id for id in ids if is_public(id)}
    return Provenance(
        mutants=len(mutants),
        public=len(public),
        slugs=len(ids - public),
        only_slugs=sum(public.isdisjoint(mutant.upstream) for mutant in mutants),
        targets=by_target(mutants),
    )


def in_words(mutants: Sequence[Planted]) -> str:
    """The count in two sentences."""
    found = count(mutants)
    planted = ", ".join(f"{TARGETS[target]} {number}" for target, number in found.targets.items())
    return (
        f"The {found.mutants} name {found.public} public references (reports, changes, commits) and {found.slugs} of"
        f" this project's own, for behaviour that no public report is known of; {found.only_slugs} name none but those."
        f" They edit: {planted}."
    )
