"""Configurations under which seeds reached branches of the reference that others seldom do, as they are kept.

`python benchmarks/reached_branches.py --keep` writes `kept.jsonl`: a line each, the configuration and the seed of the
traffic, the one first whose traffic reached most of what is rare.
"""

from __future__ import annotations

import functools
import pathlib

import msgspec

from hkv.contract.traffic import Kept
from hkv.dialects.vllm.log.structs import Header
from hkv.dialects.vllm.traffic.headers import with_later_keys

PLACE = pathlib.Path(__file__).with_name("kept.jsonl")
"""The file."""


class _Line(msgspec.Struct):
    seed: int
    header: Header


@functools.cache
def kept(version: int) -> tuple[Kept, ...]:
    """Kept configurations of a version of the log.

    Versions 3 and 4 have those of 2 and 1 too, the second half of them first: seeds of all versions in turn then go
    through everything that is kept.
    """
    lines = [msgspec.json.decode(line, type=_Line) for line in PLACE.read_bytes().splitlines()]
    known = version if version < 3 else 5 - version
    every = [Kept(_of_version(line.header, version), line.seed) for line in lines if line.header.oplog == known]
    half = len(every) // 2 if version > 2 else 0
    return (*every[half:], *every[:half])


def written(every: list[Kept]) -> bytes:
    """The file of these configurations."""
    return b"".join(msgspec.json.encode(_Line(seed, header)) + b"\n" for header, seed in every)


def _of_version(header: Header, version: int) -> Header:
    bugs = list(header.bugs)
    if version > 2 and header.partial_hits and "copied-before-written" not in bugs:
        bugs.append("copied-before-written")  # a load may begin inside a block that another request fills
    bugs = with_later_keys(header, bugs) if version > 1 else bugs
    return msgspec.structs.replace(header, oplog=version, bugs=bugs)
