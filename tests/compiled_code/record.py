"""Records of compiled programs as data, and the limits that they have to keep."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from hkv.errors import ConfigError
from tests.compiled_code import hlo
from tests.compiled_code.cases import Case

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "compiled_code.json"
LIMIT = 1.05
"""Most traffic over the ideal; every exception is in `EXCEPTIONS`."""

LARGE = 1024
"""Bytes from which a launch moves data; smaller ones compute starts, sort ids or count."""

OVERLAP = "lists may overlap, so all sources are read into an array of their own first"
WITHIN = "XLA copies nothing within an array: it reads the sources first"
SEPARATE = "a kernel moves what XLA has quantised before"
STARTS = "runs of 4 or 128 bytes, and 4 bytes for the start of each"
EXCEPTIONS = {
    ("copy_blocks", ""): OVERLAP,
    ("copy_blocks, disjoint", "xla"): WITHIN,
    **{("write_step, quantised", code): SEPARATE for code in ("mosaic", "triton")},
    **{(operation, "132 bytes"): STARTS for operation in ("write", "write_step")},
    **{(operation, "heads first, blocks padded"): STARTS for operation in ("pack", "unpack")},
}
"""Reasons, by operation and by implementation or layout; an empty one stands for all."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Outcome of compiling one program: first words of the refusal, or figures.

    `ratio` is bytes moved over the ideal; `launches` count small kernels that compute starts, `moving` only those that
    move data, whose narrowest load and store are `load` and `store`, in bytes. `copies` are of a whole pool or array.
    """

    refused: str = ""
    ratio: float = 0.0
    launches: int = 0
    moving: int = 0
    load: int = 0
    store: int = 0
    atomics: tuple[str, ...] = ()
    spilled: int = 0
    copies: tuple[str, ...] = ()


def record_of(case: Case, gpu: str) -> Record:
    """Compiles one program and measures it."""
    from tests.compiled_code import compiler

    try:
        compiled = compiler.compile_for(gpu, case.program)
    except ConfigError:
        return Record(refused="runs that bulk copies cannot move" if gpu == "sm_90" else "no bulk copies before Hopper")
    found = hlo.launches(compiled.hlo)
    moving = [launch for launch in found if launch.read + launch.written >= LARGE + case.ideal // 64]
    own = [kernel for kernel in compiled.kernels if moves_data(kernel.name, case.implementation)]
    return Record(
        ratio=round(sum(launch.read + launch.written for launch in found) / case.ideal, 3),
        launches=len(found),
        moving=len(moving),
        # Tables of starts are read as they are, 4 bytes each.
        load=min((w for kernel in own for w in wide(kernel.loads)), default=0),
        store=min((w for kernel in own for w in kernel.stores), default=0),
        atomics=tuple(sorted({atomic for kernel in compiled.kernels for atomic in kernel.atomics})),
        spilled=sum(kernel.spilled or 0 for kernel in compiled.kernels),
        copies=tuple(hlo.whole_copies(compiled.hlo, case.program.pool_bytes)),
    )


def wide(loads: tuple[int, ...]) -> set[int]:
    """Widths of loads of data: those of tables, which are 4 bytes, only where there are no others."""
    others = {width for width in loads if width != 4}
    return others if others and min(others) > 4 else set(loads)


def moves_data(kernel: str, implementation: str) -> bool:
    """False for kernels that XLA makes to compute starts, to sort ids and to count."""
    ours = any(word in kernel for word in ("move", "zero", "new_body"))
    return ours if implementation != "xla" else kernel.startswith(("input_scatter", "loop_select", "wrapped_scatter"))


def problems(case: Case, record: Record) -> list[str]:
    """Limits that a program breaks, in words."""
    if record.refused:
        return [] if case.implementation == "mosaic" else [f"refused: {record.refused}"]
    found = []
    if record.ratio > LIMIT and exception(case) is None:
        found.append(f"traffic {record.ratio} of the ideal")
    if record.atomics:
        found.append(f"atomics {record.atomics}")
    if record.copies:
        found.append(f"copies {record.copies}")
    if record.spilled:
        found.append(f"{record.spilled} bytes spilled")
    return found


def exception(case: Case) -> str | None:
    """The reason why a program may move more than `LIMIT`, if there is one."""
    for (operation, which), reason in EXCEPTIONS.items():
        if operation == case.operation and which in ("", case.implementation, case.layout):
            return reason
    return None


def save(records: Mapping[str, Mapping[str, Record]]) -> None:
    """Writes what was found, by GPU and by name, a line each."""
    versions = {"jax": jax.__version__}
    lines = [f'{{"versions": {json.dumps(versions)}']
    for gpu, by_name in records.items():
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept(record))}" for name, record in by_name.items())
        lines.append(f'"{gpu}": {{\n{rows}\n}}')
    DATA.write_text(",\n".join(lines) + "}\n", encoding="utf-8")


def kept(record: Record) -> dict[str, Any]:
    """The figures of a record that say something."""
    plain = dataclasses.asdict(record)
    return {key: value for key, value in plain.items() if value not in ("", 0, (), [])}


def load() -> tuple[dict[str, str], dict[str, dict[str, Record]]]:
    """Versions, and records by GPU and name, as they were saved."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    versions = data.pop("versions")
    tuples = ("atomics", "copies")
    return versions, {
        gpu: {
            name: Record(**{key: tuple(value) if key in tuples else value for key, value in row.items()})
            for name, row in rows.items()
        }
        for gpu, rows in data.items()
    }
