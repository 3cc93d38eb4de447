"""The state of a cache: plain objects that a text runs over, and flat int32 arrays that a program runs over.

The layout owns what makes flat arrays safe, so that no rule has to: None, spare elements, lanes, sizes.

- A field is an array with an element a record. Record 0 is None: nobody reads it, and a write that must not happen goes
  there. So does one of a line, an array with `width` elements a record.
- Any other array has one element more than it has places, for writes that must not happen; of a ring, too, where each
  place may be a live one.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from reference.language.records import Array, Checked, Column, Line, Part, Record, Settings, Table, declared, is_a


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flat array.

    Attributes:
      name: `nodes.parent`, `full.free`. table: of whose records it has an element, or a line, each; "" if it is by
      place. held: `int`, or the record that it holds. line: whether each record has several.
    """

    name: str
    table: str
    held: type
    line: bool = False


class Layout:
    """Names and kinds of a cache's flat arrays and scalars: `nodes.parent`, `full.front`, `clock`.

    Attributes:
      parts: classes of parts, by name; "" is the cache. tables: their records. arrays: flat arrays. scalars: `int`, or
      the record that one is. settings: names of scalars that rules do not write.
    """

    def __init__(self, root: type[Part]) -> None:
        self.root = root
        self.parts: dict[str, type] = {}
        self.tables: dict[str, type[Record]] = {}
        self.arrays: dict[str, Flat] = {}
        self.scalars: dict[str, type] = {}
        self.settings: set[str] = set()
        self._kinds: dict[str, Any] = {}
        self._tables: dict[type, str] = {}
        self._add(root, "")
        self._fields()

    def table_of(self, record: type) -> str:
        """The table whose records are of a class."""
        if record not in self._tables:
            raise TypeError(f"{record.__name__}: no table of {self.root.__name__} has such records")
        return self._tables[record]

    def make(self, sizes: Mapping[str, int], *, checked: bool = False) -> Any:
        """The plain objects of a cache in which every number is 0 and every record None.

        Args:
          sizes: by name, the records of each table, the places of each array, the elements of each record's line.
          checked: whether they refuse places below 0, which a lowered program does not know.

        Raises:
          TypeError: a size is missing, or one is of nothing.
        """
        wanted = {*self.tables, *(flat.name for flat in self.arrays.values() if flat.line or not flat.table)}
        if wanted != sizes.keys():
            raise TypeError(f"sizes: expected {sorted(wanted)}, got {sorted(sizes)}")
        cache = self._made(self.root, "", sizes)
        if checked:
            owners = [(cache, name) for name in (*self.tables, *(f.name for f in self.arrays.values() if not f.table))]
            owners += [(each, f.name) for t in self.tables for f in self._lines(t) for each in self._at(cache, t)[1:]]
            for owner, name in owners:
                part, _, last = name.rpartition(".")
                held = self._at(owner, part) if owner is cache else owner
                setattr(held, last, Checked(getattr(held, last)))
        return cache

    def blank(self, sizes: Mapping[str, int], but: Collection[str] = ()) -> dict[str, np.ndarray]:
        """`arrays_of` what `make` makes, without making it; all `but` some, of which no size is asked."""
        shapes: dict[str, Any] = {name: () for name in self.scalars if name not in but}
        for name in self.arrays.keys() - but:
            flat = self.arrays[name]
            records = sizes[flat.table] if flat.table else sizes[name]
            shapes[name] = (records + 1) * (sizes[name] if flat.line else 1)
        return {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}

    def grow(self, cache: Any, table: str, count: int) -> None:
        """Gives a table of plain objects so many more records, which are as `make` makes them."""
        records = self._at(cache, table)
        lines = {flat.name: len(getattr(records[1], flat.name.rpartition(".")[2])) for flat in self._lines(table)}
        records += [self._record(table, lines) for _ in range(count)]

    def lengthen(self, cache: Any, table: str, count: int) -> None:
        """Gives each line of a table's records so many more elements."""
        for flat in self._lines(table):
            for record in self._at(cache, table)[1:]:
                line = getattr(record, flat.name.rpartition(".")[2])
                line += [_nothing(flat.held)] * count

    def _lines(self, table: str) -> list[Flat]:
        return [flat for flat in self.arrays.values() if flat.table == table and flat.line]

    def sizes_of(self, cache: Any) -> dict[str, int]:
        """The sizes of plain objects, as `make` takes them."""
        sizes = {table: len(self._at(cache, table)) - 1 for table in self.tables}
        for flat in self.arrays.values():
            if flat.line:
                sizes[flat.name] = len(getattr(self._at(cache, flat.table)[1], flat.name.rpartition(".")[2]))
            elif not flat.table:
                sizes[flat.name] = len(self._at(cache, flat.name))
        return sizes

    def records_of(self, cache: Any) -> dict[int, int]:
        """The number of each record of plain objects, by its `id`."""
        return {id(each): n for table in self.tables for n, each in enumerate(self._at(cache, table)) if n}

    def numbers_of(
        self, cache: Any, names: Collection[str] | None = None, records: Mapping[int, int] | None = None
    ) -> dict[str, Any]:
        """The numbers of plain objects: of each flat array a list, of each scalar one.

        Args:
          cache: the plain objects.
          names: arrays and scalars; None for all.
          records: what `records_of` says, where that is known.
        """
        numbers = self.records_of(cache) if records is None else records

        def number(value: Any) -> int:
            return 0 if value is None else numbers[id(value)] if isinstance(value, Record) else int(value)

        found: dict[str, Any] = {}
        for name in [*self.scalars, *self.arrays] if names is None else names:
            flat = self.arrays.get(name)
            found[name] = number(self._at(cache, name)) if flat is None else list(map(number, self._flat(cache, flat)))
        return found

    def arrays_of(self, cache: Any) -> dict[str, np.ndarray]:
        """The flat arrays, and scalars of shape (), of plain objects."""
        return {name: np.array(held, np.int32) for name, held in self.numbers_of(cache).items()}

    def restored(self, numbers: Mapping[str, Any]) -> Any:
        """Plain objects of numbers, or of arrays and scalars, all of them."""
        rows = {flat.table: len(numbers[flat.name]) for flat in self.arrays.values() if flat.table and not flat.line}
        sizes = {table: count - 1 for table, count in rows.items()}
        for flat in self.arrays.values():
            if flat.line or not flat.table:
                sizes[flat.name] = (
                    len(numbers[flat.name]) // rows[flat.table] if flat.line else len(numbers[flat.name]) - 1
                )
        cache = self.make(sizes)
        self.load(cache, numbers)
        return cache

    def load(self, cache: Any, arrays: Mapping[str, Any]) -> None:
        """Gives plain objects the values of flat arrays and scalars; of those that are missing they keep theirs."""
        rows = {kind: self._at(cache, table) for table, kind in self.tables.items()}

        def values(held: type, numbers: Any) -> list[Any]:
            return [rows[held][n] for n in numbers] if held in rows else numbers

        for name, held in self.scalars.items():
            if name in arrays:
                owner, _, last = name.rpartition(".")
                setattr(self._at(cache, owner), last, values(held, [int(arrays[name])])[0])
        for name in self.arrays.keys() & arrays.keys():
            flat = self.arrays[name]
            self._put(cache, flat, values(flat.held, np.asarray(arrays[name]).tolist()))

    def change(self, cache: Any, name: str, places: list[int], values: list[int]) -> None:
        """Gives plain objects some elements of a flat array; places that stand for None, or are spare, are passed over.

        Args:
          cache: the plain objects.
          name: the array; of a scalar, the one place is 0.
          places: of the elements.
          values: their numbers.
        """
        flat = self.arrays.get(name)
        held = self.scalars[name] if flat is None else flat.held
        of = self._at(cache, self._tables[held]) if held in self._tables else None
        found = values if of is None else [of[n] for n in values]
        owner, _, last = name.rpartition(".")
        if flat is None:
            setattr(self._at(cache, owner), last, found[0])
            return
        records = self._at(cache, flat.table) if flat.table else []
        width = len(getattr(records[1], last)) if flat.line else 1
        column = is_a(self._kinds.get(name), Column)
        for place, value in zip(places, found, strict=True):
            record = place // width
            if not flat.table:
                array = self._at(cache, name)
                if place < len(array):
                    array[place] = value
            elif record and column:
                self._at(cache, name)[records[record]] = value
            elif record and flat.line:
                getattr(records[record], last)[place % width] = value
            elif record:
                setattr(records[record], last, value)

    def _add(self, part: type, name: str) -> None:
        self.parts[name], kinds = declared(part)
        for field, held in kinds.items():
            full = f"{name}.{field}" if name else field
            self._kinds[full] = held
            arguments = typing.get_args(held)
            if is_a(held, Table):
                self.tables[full] = arguments[0]
                if self._tables.setdefault(arguments[0], full) != full:
                    raise TypeError(f"{full}: {self._tables[arguments[0]]} has {arguments[0].__name__} already")
            elif is_a(held, Part):
                self._add(held, full)
            elif is_a(held, Array):
                self.arrays[full] = Flat(full, "", arguments[0])
            elif not is_a(held, Column):
                self.scalars[full] = held
                if issubclass(self.parts[name], Settings):
                    self.settings.add(full)

    def _fields(self) -> None:
        """Arrays of records, once all tables are known."""
        for table, kind in self.tables.items():
            for field, held in declared(kind)[1].items():
                line = is_a(held, Line)
                name = f"{table}.{field}"
                self.arrays[name] = Flat(name, table, typing.get_args(held)[0] if line else held, line)
        for name, held in self._kinds.items():
            if is_a(held, Column):
                kind, of = typing.get_args(held)
                self.arrays[name] = Flat(name, self.table_of(kind), of)
        for name, held in [*self.scalars.items(), *((flat.name, flat.held) for flat in self.arrays.values())]:
            if held is not int and held not in self._tables:
                raise TypeError(f"{name}: expected int or a record of a table, got {held!r}")

    def _made(self, kind: type, name: str, sizes: Mapping[str, int]) -> Any:
        made = self.parts[name]()
        for field in declared(kind)[1]:
            full = f"{name}.{field}" if name else field
            if full in self.tables:
                value: Any = Table([None, *(self._record(full, sizes) for _ in range(sizes[full]))])
            elif full in self.parts:
                value = self._made(self._kinds[full], full, sizes)
            elif full in self.scalars:
                value = _nothing(self.scalars[full])
            elif self.arrays[full].table:
                value = Column(_nothing(self.arrays[full].held))
            else:
                value = Array([_nothing(self.arrays[full].held)] * sizes[full])
            setattr(made, field, value)
        return made

    def _record(self, table: str, sizes: Mapping[str, int]) -> Record:
        made = self.tables[table]()
        for field in declared(self.tables[table])[1]:
            flat = self.arrays[f"{table}.{field}"]
            nothing = _nothing(flat.held)
            setattr(made, field, Line([nothing] * sizes[flat.name]) if flat.line else nothing)
        return made

    def _flat(self, cache: Any, flat: Flat) -> list[Any]:
        """Values of a flat array, from plain objects."""
        if not flat.table:
            return [*self._at(cache, flat.name), 0]
        records = self._at(cache, flat.table)[1:]
        if is_a(self._kinds.get(flat.name), Column):
            column = self._at(cache, flat.name)
            return [0, *(column[each] for each in records)]
        field = flat.name.rpartition(".")[2]
        if not flat.line:
            return [0, *(getattr(each, field) for each in records)]
        lines = [getattr(each, field) for each in records]
        return [0] * len(lines[0]) + [value for line in lines for value in line]

    def _put(self, cache: Any, flat: Flat, values: list[Any]) -> None:
        """Gives plain objects the values of a flat array."""
        if not flat.table:
            self._at(cache, flat.name)[:] = values[:-1]
            return
        records = self._at(cache, flat.table)[1:]
        if is_a(self._kinds.get(flat.name), Column):
            self._at(cache, flat.name).update(zip(records, values[1:], strict=True))
            return
        field, width = flat.name.rpartition(".")[2], len(values) // (len(records) + 1)
        for n, each in enumerate(records, 1):
            setattr(each, field, Line(values[n * width : (n + 1) * width]) if flat.line else values[n])

    def _at(self, cache: Any, name: str) -> Any:
        for part in name.split(".") if name else ():
            cache = getattr(cache, part)
        return cache


def _nothing(held: type) -> Any:
    return 0 if held is int else None
