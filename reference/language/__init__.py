"""The language of a text: the rules of a cache as plain Python over typed records (`docs/lowering.md`).

A *text* is a module of rules. Run as it stands, over the plain objects of a `Layout`, it is the reference;
`hkv.lowering` compiles the same functions to one JAX program over the layout's flat arrays.

- A rule is a function whose first parameter is the cache or a part of it.
- Every number is an int32; `//` and `%` are of numbers not below 0; `NOTHING` is a number that stands for none.
- A rule refuses before its first write.
- Expressions are computed in Python's order, rules that write among them.
"""

from reference.language.clauses import Clause, choice, clause, recording, seldom
from reference.language.layout import Layout
from reference.language.mechanisms import FreeList, Heap, Ring
from reference.language.records import NOTHING, Array, Column, Line, Part, Record, Settings, Table, another
from reference.language.text import Text

__all__ = [
    "NOTHING",
    "Array",
    "Clause",
    "Column",
    "FreeList",
    "Heap",
    "Layout",
    "Line",
    "Part",
    "Record",
    "Ring",
    "Settings",
    "Table",
    "Text",
    "another",
    "choice",
    "clause",
    "recording",
    "seldom",
]
