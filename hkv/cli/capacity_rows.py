"""Every combination of models and options, planned: the rows of a capacity table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract.plan_command import Capacity, Several
from hkv.errors import ConfigError, HKVError

MOST_ROWS = 10_000
"""A table that is longer is refused."""


@dataclasses.dataclass(frozen=True)
class CapacityRow:
    """One model under one choice of options.

    Attributes:
      model: its config, as it was named.
      options: the values of those options that may have several, by name.
      capacity: what fits, or None if it was refused.
      refused: why, or empty.
    """

    model: str
    options: dict[str, Any]
    capacity: Capacity | None
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """The row as plain values."""
        fits = {} if self.capacity is None else dataclasses.asdict(self.capacity)
        return {"model": self.model, **self.options, **fits, "refused": self.refused or None}


def combinations(configs: Sequence[str], options: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each config with each combination of the options that were given several values, the last varying fastest.

    Raises:
      ConfigError: more than `MOST_ROWS`.
    """
    lists = {name: values for name, values in options.items() if isinstance(values, Several)}
    chosen = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    if len(configs) * len(chosen) > MOST_ROWS:
        raise ConfigError("rows of the table", len(configs) * len(chosen), f"at most {MOST_ROWS:,}")
    return [(config, choice) for config in configs for choice in chosen]


def capacity_rows(
    wanted: Sequence[tuple[str, dict[str, Any]]], capacity: Callable[[str, dict[str, Any]], Capacity]
) -> list[CapacityRow]:
    """A row for each config and choice of options.

    Args:
      wanted: the combinations.
      capacity: plans one and says what fits.

    Raises:
      HKVError: all were refused, and for the same reason.
    """
    rows: list[CapacityRow] = []
    errors: list[HKVError] = []
    for config, choice in wanted:
        try:
            rows.append(CapacityRow(config, choice, capacity(config, choice)))
        except HKVError as error:
            errors.append(error)
            rows.append(CapacityRow(config, choice, None, " ".join(str(error).split())))
    if len(errors) == len(rows) and len({row.refused for row in rows}) == 1:
        raise errors[0]
    return rows
