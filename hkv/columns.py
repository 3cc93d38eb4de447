"""Records as columns: a mapping of names to NumPy arrays of one length, as `pandas.DataFrame` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Columns of one length, by name."""

T = TypeVar("T")


def columns(records: Sequence[T], fields: Mapping[str, tuple[Callable[[T], object], npt.DTypeLike]]) -> Columns:
    """One column a field, one entry a record.

    Args:
      records: the records; there may be none.
      fields: by the column's name, what it holds of a record, and its dtype: `str` for words, `object` where a value
        may be None.
    """
    return {name: np.array([of(record) for record in records], dtype) for name, (of, dtype) in fields.items()}
