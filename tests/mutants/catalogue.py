"""Every planted defect, read from `tests/mutants/rows`, one file a section."""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Iterator, Sequence

import msgspec

from hkv.testing.planting import Patch
from tests.mutants.provenance import TARGETS, target_of
from tests.mutants.row import DIFF, Planted

FOLDER = pathlib.Path(__file__).resolve().parent / "rows"

PUBLISHED = (
    *("hit-length", "eviction", "null-block", "windows", "recurrent-state", "hashing", "partial-blocks", "admission"),
    *("preemption", "speculation", "events", "layouts", "kernel-split", "planning", "transfers", "tiers", "rtp-llm"),
)
"""The kinds of published bugs; suites judge them."""

OWN = ("properties", "compiled", "state", "step", "paged", "kernels", "rtp-tree", "rtp-memory")
"""Sections of one-line edits of our own; tests judge them."""


INSTALLED = ("vllm", "sglang", "vllm-offload")
"""Sections of defects in installed packages, each called as the engine is that drives it; `hkv diff` judges them."""


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """A row as its file has it; several ids are separated by blanks, several invariants by `|`."""

    edits: list[tuple[str, str, str]]
    judge: str = DIFF
    arguments: list[str | int] = []
    expected: str = ""
    upstream: str = ""
    wrong: str = ""
    reader: str = ""


def _read(section: str) -> Iterator[Planted]:
    rows = msgspec.convert(tomllib.loads((FOLDER / f"{section}.toml").read_text("utf-8")), dict[str, _Row])
    for name, row in rows.items():
        edits = tuple(Patch(*edit) for edit in row.edits)
        expected = tuple(row.expected.split("|")) if row.expected else ()
        upstream = tuple(row.upstream.split())
        arguments = tuple(row.arguments)
        yield Planted(name, section, edits, row.judge, arguments, expected, upstream, row.wrong, row.reader)


SECTIONS = {section: tuple(_read(section)) for section in (*PUBLISHED, *OWN)}
"""The rows of each section."""

IN_PACKAGES = {section: tuple(_read(section)) for section in INSTALLED}
"""The rows of `INSTALLED`, which are planted only where they are asked for: the package has to be there."""

MUTANTS = {row.name: row for rows in SECTIONS.values() for row in rows}
"""Every row, by name."""


def choose(only: Sequence[str], package: str | None = None) -> list[Planted]:
    """The rows of those sections, targets and names; all without any, of an installed package if one is named.

    Raises:
      KeyError: a name that is none of these.
    """
    if package is not None:
        rows = IN_PACKAGES[package]
        for name in sorted(set(only) - {row.name for row in rows}):
            raise KeyError(name)
        return [row for row in rows if not only or row.name in only]
    for name in only:
        if name not in SECTIONS and name not in MUTANTS and name not in TARGETS:
            raise KeyError(name)
    wanted = frozenset(only)
    return [row for row in MUTANTS.values() if not only or wanted & {row.name, row.section, target_of(row)}]
