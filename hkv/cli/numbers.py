"""Types of options that are numbers: every one has an upper bound, and none is NaN."""

from __future__ import annotations

import math
from typing import Any

import click

from hkv.errors import ConfigError
from hkv.limits import MAX_SECONDS


class Number(click.FloatRange):
    """A finite number in a range; `click.FloatRange` takes NaN for one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


SECONDS = Number(min=0, max=MAX_SECONDS, min_open=True)
"""A time to wait or to go on for."""


def percentage(name: str, text: str) -> float:
    """The number in `60%`, or in `60`.

    Raises:
      ConfigError: it is none from 0 to 100.
    """
    try:
        found = float(text.removesuffix("%"))
    except ValueError:
        found = math.nan
    if not 0 <= found <= 100:  # NaN is neither
        raise ConfigError(name, text, "a percentage from 0% to 100%")
    return found
