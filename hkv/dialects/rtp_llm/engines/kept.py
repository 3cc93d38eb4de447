"""Objects that an engine keeps under names that a log gives: held blocks, exported keys."""

from __future__ import annotations

from typing import Any

from hkv.errors import OperationError


def check_unused(kept: dict[str, Any], name: str) -> None:
    """Raises OperationError if something is kept under that name."""
    if name in kept:
        raise OperationError("name", name, "a name under which nothing is kept")


def taken(kept: dict[str, Any], name: str) -> Any:
    """Object kept under a name, which is free from then on.

    Raises:
      OperationError: nothing is.
    """
    if name not in kept:
        raise OperationError("name", name, "a name under which something is kept")
    return kept.pop(name)
