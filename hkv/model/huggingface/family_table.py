"""Families that differ in numbers alone, one a line of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hkv.model.huggingface.family import EMPTY, REQUIRED, Family, words

if TYPE_CHECKING:
    from hkv.model.huggingface.decoder import Decoder
    from hkv.model.huggingface.model import Model

COLUMNS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "longest": "max_position_embeddings",
    "window": "sliding_window",
}
"""Headings that stand for longer names of fields."""

CELLS = {"-": None, "!": REQUIRED, "true": True, "false": False}
"""Cells that are no number: derived or absent where the file lacks it; required; truth values."""


def families(
    table: str,
    read: Callable[[Decoder], Model],
    *,
    more: Mapping[str, Any] = EMPTY,
    inert: str | Mapping[str, str] = "",
    only: Mapping[str, Any] = EMPTY,
    spellings: Mapping[str, str] = EMPTY,
) -> dict[str, Family]:
    """Families by `model_type`, of a table of their deciding fields' defaults.

    Args:
      table: a heading, `model_type` and the fields' names or `COLUMNS`; then a line each: the type, a default for each
        field (or a cell of `CELLS`, or `.` where the family has no such field), and the model's name.
      read: the reader of them all.
      more: deciding fields that all of them have, with the default.
      inert: fields on which nothing depends, of all or by `model_type`.
      only: as in `Family`.
      spellings: as in `Family`.
    """
    heading, *lines = [line.split() for line in table.strip().splitlines()]
    found = {}
    for model_type, *cells in lines:
        values = cells[: len(heading) - 1]
        columns = [COLUMNS.get(name, name) for name in heading[1:]]
        fields = {name: _cell(cell) for name, cell in zip(columns, values, strict=True) if cell != "."}
        own = inert if isinstance(inert, str) else inert.get(model_type, "")
        name = " ".join(cells[len(values) :])
        found[model_type] = Family(name, read, {**more, **fields}, words(own), only, spellings)
    return found


def _cell(text: str) -> Any:
    return CELLS[text] if text in CELLS else int(text)
