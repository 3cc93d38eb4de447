"""Connectors held to the plan: a function `(memory, layer, block) -> byte ranges`, in Python or C, judged byte by byte.

A connector moves blocks of a cache that it has not laid out: it gets tensors when it registers them, and has to
know from these which bytes are one block of one layer. `hkv check-connector` describes memory to such a function as an
engine does (`memory`), asks it for blocks of every layout that HKV plans (`cases`), compares the bytes with the plan's
(`check`), and names the mistake where it knows a wrong connector that answers alike (`mistakes`). `connector.h` has the
same for C. NumPy is all that this needs, and no other package: `docs/layouts.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader
from hkv.connectors.memory import Group, Layer, Memory, Range, Tensor

if TYPE_CHECKING:
    from hkv.connectors.check import check_connector

__all__ = ["Group", "Layer", "Memory", "Range", "Tensor", "check_connector"]

__getattr__ = loader(__name__, {"hkv.connectors.check": "check_connector"})
