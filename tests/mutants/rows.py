"""Every planted defect, by target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

from tests.mutants import compiled, kernels, paged, state, step
from tests.mutants.row import Planted

ROWS: MappingProxyType[str, tuple[Planted, ...]] = MappingProxyType(
    {
        target: tuple(dataclasses.replace(row, target=target) for row in module.ROWS)
        for target, module in (
            ("compiled", compiled),
            ("state", state),
            ("step", step),
            ("paged", paged),
            ("kernels", kernels),
        )
    }
)
"""The defects of each part: the compiled rules, their mechanisms, whole steps, bytes by block tables, and kernels."""

EVERY = MappingProxyType({"compiled": 20, "state": 2, "step": 6, "paged": 1, "kernels": 1})
"""Of how many rows the sample of each target has one: compiled rules take ten seconds a row, bytes less than one."""


def choose(targets: Sequence[str] = (), names: Sequence[str] = (), sample: bool = False) -> list[Planted]:
    """The rows of those targets and names, all without any; of the sample only, if wanted.

    Raises:
      KeyError: a target or a name that there is not.
    """
    every = {row.name: row for rows in ROWS.values() for row in rows}
    for name in (*targets, *names):
        if name not in ROWS and name not in every:
            raise KeyError(name)
    found = [row for row in every.values() if not (targets or names) or row.target in targets or row.name in names]
    if sample:
        sampled = {row.name for target, rows in ROWS.items() for row in rows[:: EVERY[target]]}
        found = [row for row in found if row.name in sampled]
    return found
