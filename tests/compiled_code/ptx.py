"""Kernels of PTX text: how wide they load and store, whether they use atomics, and what `ptxas` says of spills."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

ACCESS = re.compile(
    r"\b(ld|st)\.(?:relaxed\.|volatile\.|acquire\.|release\.|weak\.)*(?:sys\.|gpu\.|cta\.)?global([\w.:]*)"
)
BULK_LOAD = re.compile(r"\bcp\.async\.bulk\.(?:tensor|shared)\S*\.(?:global|mbarrier)\S*")
BULK_STORE = re.compile(r"\bcp\.async\.bulk\S*\.global\.shared\S*")
ATOMIC = re.compile(r"\b(?:atom|red)\.(?!async)\S*")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
BULK = 128
"""Width written for a bulk copy, which no register takes part in: the least that one moves here."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One entry of a module, with the bytes of each load from global memory as they stand in the text, BULK for a bulk
    copy, the same of stores, and the bytes that `ptxas` spills; None where it was not asked.
    """

    name: str
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    atomics: tuple[str, ...]
    spilled: int | None = None


def width(suffix: str) -> int:
    """Bytes of an access with that suffix, such as `.nc.v4.b32`."""
    bits = re.findall(r"\.[bufs](\d+)", suffix)
    lanes = re.findall(r"\.v(\d)", suffix)
    return int(bits[-1]) // 8 * (int(lanes[-1]) if lanes else 1)


def kernels(text: str) -> Iterator[Kernel]:
    """Every entry of a module."""
    starts = [match.start() for match in re.finditer(r"\.entry\s", text)]
    for start, end in itertools.pairwise([*starts, len(text)]):
        body = text[start:end]
        name = re.search(r"\.entry\s+(\w+)", body)
        assert name is not None
        found = {"ld": [], "st": []}
        for kind, suffix in ACCESS.findall(body):
            found[kind].append(width(suffix))
        stores = BULK_STORE.findall(body)
        loads = [match for match in BULK_LOAD.findall(body) if match not in stores]
        yield Kernel(
            name[1],
            (*found["ld"], *[BULK] * len(loads)),
            (*found["st"], *[BULK] * len(stores)),
            tuple(sorted(set(ATOMIC.findall(body)))),
        )


def spilled(text: str, ptxas: pathlib.Path) -> int:
    """Bytes spilled by all kernels of a module, as `ptxas -v` counts them."""
    target = re.search(r"\.target (sm_\w+)", text)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "module.ptx")
        source.write_text(text)
        command = [str(ptxas), "-v", f"-arch={target[1]}", str(source), "-o", str(source.with_suffix(".cubin"))]
        ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-500:])
    return sum(int(stored) + int(loaded) for stored, loaded in SPILLS.findall(ran.stderr))
