"""The order of operations where nothing but a request's name decides what may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hkv.errors import OperationError


class NamedRequests:
    """A lifecycle: requests arrive under a name that none has, and end; whatever else names one, it has arrived.

    Args:
      arrives: the operation by which a request arrives.
      ends: the operation by which it ends.
      granted: whether an answer to an arrival lets the request in.
    """

    def __init__(self, arrives: type, ends: type, granted: Callable[[Any], bool] = lambda answer: True) -> None:
        self._arrives, self._ends, self._granted = arrives, ends, granted
        self._names: set[str] = set()

    def follow(self, operation: Any) -> None:
        """Checks one operation, and ends a request.

        Raises:
          OperationError: a name that is taken, or one that no request has; nothing changed.
        """
        id = getattr(operation, "id", None)
        if id is None:
            return
        if (id in self._names) == isinstance(operation, self._arrives):
            raise OperationError("id", id, "a name that no request has" if id in self._names else "a request's name")
        if isinstance(operation, self._ends):
            self._names.remove(id)

    def answered(self, operation: Any, answer: Any) -> None:
        """Lets a request in."""
        if isinstance(operation, self._arrives) and self._granted(answer):
            self._names.add(operation.id)
