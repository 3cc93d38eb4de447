"""Tiers of chunk objects, in memory and on disk, under random use: bytes, order, pins, and what survives a restart."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from hkv.contract.traffic import Choices
from hkv.errors import OperationError
from hkv.tier.disk import DiskTier, FileSystem
from hkv.tier.tier import MemoryTier
from tests.suites.suite import CaseSuite, case_check

ACTIONS = ("store", "retrieve", "pin", "unpin", "evict", "damage", "reopen")

OVERHEAD = 400
"""Bytes that a file on disk may have besides its object's."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One thing that is done with a tier: one of `ACTIONS`, and the bytes that a store stores."""

    action: str
    key: bytes
    size: int


@dataclasses.dataclass(frozen=True)
class TierCase:
    """A tier of so many bytes and what is done with it, in order."""

    disk: bool
    capacity: int
    uses: tuple[Use, ...]

    @property
    def operations(self) -> int:
        """Things that are done."""
        return len(self.uses)

    def __str__(self) -> str:
        where = "disk" if self.disk else "memory"
        steps = [f"{use.action} {use.key.decode()}" + f" {use.size}" * (use.action == "store") for use in self.uses]
        return f"{self.capacity} bytes of {where}: {', '.join(steps)}"


def draw_tier_case(choices: Choices) -> TierCase:
    """A random case."""
    disk = choices.chance(35)
    unit = OVERHEAD if disk else 10
    capacity = unit * choices.integer(2, 5) + choices.integer(0, unit)
    actions = ACTIONS if disk else ACTIONS[:5]
    uses = []
    while choices.chance(92) and len(uses) < 30:
        action = choices.pick(("store", "store", "retrieve", "pin", "store", *actions))
        at = choices.integer(0, 7)
        key = b"abcde"[at : at + 1] or (uses[-1].key if uses else b"a")
        uses.append(Use(action, key, choices.integer(1, 2 * unit)))
    return TierCase(disk, capacity, tuple(uses))


@dataclasses.dataclass(frozen=True)
class Seen:
    """Result of one use of a tier: the answer, `refused` for an `OperationError`, and the keys before and after, least
    recently used first. `used` is what the tier says, `sizes` the bytes of each object as they are.
    """

    use: Use
    answer: Any
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    used: int
    sizes: dict[bytes, int]
    calls: tuple[str, ...]
    incidents: int


class _Recorder(FileSystem):
    """A file system that notes what it is asked, and leaves out waiting for the disk."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open(self, path: pathlib.Path) -> int:
        self.calls.append("open")
        return super().open(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self.calls.append("write")
        return super().write(descriptor, data[: max(1, len(data) // 2)])

    def fsync(self, descriptor: int) -> None:
        self.calls.append("fsync")

    def replace(self, source: pathlib.Path, target: pathlib.Path) -> None:
        self.calls.append("replace")
        super().replace(source, target)

    def sync_folder(self, folder: pathlib.Path) -> None:
        self.calls.append("sync folder")


def content_of(number: int, size: int) -> np.ndarray:
    """The bytes that use `number` stores."""
    return ((np.arange(size) * 7 + number * 13 + 1) % 251).astype(np.uint8)


def history(case: TierCase) -> Iterator[Seen]:
    """Result of each use, in order."""
    with tempfile.TemporaryDirectory() as folder:
        disk = _Recorder()
        tier: Any = DiskTier(folder, case.capacity, disk) if case.disk else MemoryTier(case.capacity, "numpy")
        stored: dict[bytes, int] = {}
        try:
            for number, use in enumerate(case.uses):
                before = tier.keys
                disk.calls.clear()
                if use.action == "reopen":
                    tier.close()
                    tier = DiskTier(folder, case.capacity, disk)
                    answer: Any = None
                else:
                    answer = _perform(tier, use, number)
                if use.action == "store" and answer is True:
                    stored[use.key] = use.size
                sizes = {key: stored.get(key, 0) for key in tier.keys}
                if case.disk:
                    sizes = {
                        bytes.fromhex(p.stem): p.stat().st_size for p in pathlib.Path(folder).glob("*.safetensors")
                    }
                incidents = len(tier.incidents) if case.disk else 0
                yield Seen(use, answer, before, tier.keys, tier.used_bytes, sizes, tuple(disk.calls), incidents)
        finally:
            if case.disk:
                tier.close()


def _perform(tier: Any, use: Use, number: int) -> Any:
    try:
        match use.action:
            case "store":
                data = content_of(number, use.size)
                answer = tier.store(use.key, data)
                data[:] = 255  # the caller's buffer is used again
                return answer
            case "retrieve":
                found = tier.retrieve(use.key)
                return None if found is None else bytes(np.asarray(getattr(found, "data", found)).tobytes())
            case "pin":
                return tier.pin(use.key)
            case "unpin":
                return tier.unpin(use.key)
            case "evict":
                return tier.evict(use.key)
            case _:
                path = tier.folder / f"{use.key.hex()}.safetensors"
                if path.exists():
                    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
                return None
    except OperationError:
        return "refused"


@case_check("tier content", "B-I7", "B-I27")
def content(case: TierCase) -> Iterator[str]:
    """A retrieved object is the one last stored under the key; damaged or absent objects are misses, never answers."""
    held: dict[bytes, bytes] = {}
    damaged: set[bytes] = set()
    for number, seen in enumerate(history(case)):
        key = seen.use.key
        if seen.use.action == "store" and seen.answer is True:
            held[key] = content_of(number, seen.use.size).tobytes()
            damaged.discard(key)
        elif seen.use.action == "damage" and key in seen.before:
            damaged.add(key)
        elif seen.use.action == "retrieve":
            wanted = held.get(key) if key in seen.before and key not in damaged else None
            if seen.answer != wanted:
                yield f"use {number}: {key!r} gave {seen.answer!r}, not {wanted!r}"
            if key in damaged and key in seen.before and (key in seen.after or not seen.incidents):
                yield f"use {number}: {key!r} is damaged, and stays without a word"


@case_check("tier order", "B-I33")
def order(case: TierCase) -> Iterator[str]:
    """Keys stand in order of use; a store evicts the least recently used that are not pinned, as few as will do."""
    recent: list[bytes] = []
    pins: Counter[bytes] = Counter()
    last: dict[bytes, int] = {}
    for number, seen in enumerate(history(case)):
        key, action = seen.use.key, seen.use.action
        if action == "reopen":
            recent, pins = list(seen.after), Counter()
        gone = [other for other in recent if other not in seen.after and other != key]
        if action == "store" and seen.answer is True:
            free = [other for other in recent if not pins[other] and other != key]
            if gone != free[: len(gone)]:
                yield f"use {number}: {gone} were evicted, where the least recently used are {free[: len(gone)]}"
            if gone and sum(seen.sizes.values()) + last.get(gone[-1], 0) <= case.capacity:
                yield f"use {number}: {gone[-1]!r} was evicted, though there was room"
        elif gone:
            yield f"use {number}: {gone} are gone"
        _track(pins, seen)
        recent = [other for other in recent if other in seen.after and (other != key or not _uses(seen))]
        recent += [key] * (_uses(seen) and key in seen.after)
        last = seen.sizes
        if recent != list(seen.after):
            yield f"use {number}: the keys are {seen.after}, in order of use {recent}"


def _uses(seen: Seen) -> bool:
    return seen.use.action in ("store", "retrieve") and seen.answer not in (False, None, "refused")


def _track(pins: Counter[bytes], seen: Seen) -> None:
    if seen.use.action == "pin" and seen.answer is True:
        pins[seen.use.key] += 1
    elif seen.use.action == "unpin" and seen.answer is None and pins[seen.use.key]:
        pins[seen.use.key] -= 1
    for key in [key for key in pins if key not in seen.after]:
        del pins[key]


@case_check("tier pins", "B-I28", "B-I38")
def pins(case: TierCase) -> Iterator[str]:
    """A pinned object stays, as it is, until it is unpinned as often; nothing else can be unpinned."""
    held: Counter[bytes] = Counter()
    for number, seen in enumerate(history(case)):
        key, action = seen.use.key, seen.use.action
        lost = [other for other in held if held[other] and other not in seen.after]
        if action not in ("reopen", "retrieve") and lost:
            yield f"use {number}: {lost} are pinned, and gone"
        if action in ("store", "evict") and held[key] and seen.answer is True:
            yield f"use {number}: {key!r} is pinned, and was replaced or evicted"
        if action == "unpin" and (seen.answer == "refused") != (held[key] == 0):
            yield f"use {number}: unpinning {key!r}, pinned {held[key]} times, gave {seen.answer}"
        if action == "reopen":
            held.clear()
        _track(held, seen)


@case_check("tier bytes", "B-I1", "B-I24")
def used(case: TierCase) -> Iterator[str]:
    """The bytes in use are the objects', never more than there may be; a refusal was needed and changes nothing."""
    held: Counter[bytes] = Counter()
    before: dict[bytes, int] = {}
    for number, seen in enumerate(history(case)):
        if seen.used != sum(seen.sizes.values()) or seen.used > case.capacity:
            yield f"use {number}: {seen.used} bytes of {case.capacity} in use, and objects of {seen.sizes}"
        if set(seen.sizes) != set(seen.after):
            yield f"use {number}: keys {seen.after}, objects {sorted(seen.sizes)}"
        if seen.use.action == "store" and seen.answer is False:
            if seen.before != seen.after:
                yield f"use {number}: a refused store left {seen.after} of {seen.before}"
            pinned = sum(size for key, size in before.items() if held[key] and key != seen.use.key)
            most = seen.use.size + (OVERHEAD if case.disk else 0)
            if not held[seen.use.key] and pinned + most <= case.capacity:
                yield f"use {number}: {seen.use.size} bytes were refused beside {pinned} that are pinned"
        if seen.use.action == "reopen":
            held.clear()
        _track(held, seen)
        before = seen.sizes


@case_check("tier on disk", "B-I27", "B-I32")
def durable(case: TierCase) -> Iterator[str]:
    """A stored object is on the disk before it has its name, and the folder after it; a restart finds all of it."""
    for number, seen in enumerate(history(case) if case.disk else ()):
        if seen.use.action == "store" and seen.answer is True:
            steps = [call for call in dict.fromkeys(seen.calls) if call != "write"]
            if steps != ["open", "fsync", "replace", "sync folder"]:
                yield f"use {number}: a store asked the disk for {steps}"
        if seen.use.action == "reopen" and set(seen.after) != set(seen.before):
            yield f"use {number}: {sorted(seen.before)} were there before the restart, {sorted(seen.after)} after it"


SUITE = CaseSuite(
    "tiers",
    "tiers in memory and on disk under random use",
    draw_tier_case,
    (content, order, pins, used, durable),
    pace=3,
)
