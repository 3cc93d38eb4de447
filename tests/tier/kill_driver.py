"""Kills real processes at every operating-system call of the disk tier: `python kill_driver.py FOLDER`.

A child performs a fixed series of stores over a tier and kills itself with SIGKILL before, in the middle of, or after
its n-th call; n and the moment sweep all there are. The parent then opens what is left and retrieves everything.
Prints one JSON object: how many children were killed, what they left, and every wrong answer.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import shutil
import signal
import sys

import numpy as np

from hkv.tier.disk import DiskTier, FileSystem

CAPACITY = 40_000
KEYS = [bytes([65 + index]) * 4 for index in range(5)]


def contents(round_number: int, key: bytes) -> np.ndarray:
    generator = np.random.default_rng([round_number, *key])
    return generator.integers(0, 256, 6_000 + 500 * round_number, dtype=np.uint8)


class KillingFileSystem(FileSystem):
    """Kills the process at call number `fatal`, at the `moment` "before", "middle" or "after"."""

    def __init__(self, fatal: int, moment: str) -> None:
        self.fatal = fatal
        self.moment = moment
        self.calls = 0

    def _perform(self, call, half=None):
        self.calls += 1
        if self.calls - 1 != self.fatal:
            return call()
        if self.moment == "middle" and half is not None:
            half()
        if self.moment == "after":
            call()
        os.kill(os.getpid(), signal.SIGKILL)

    def open(self, path):
        return self._perform(lambda: super(KillingFileSystem, self).open(path))

    def write(self, descriptor, data):
        # In pieces, so that a file is written by several calls.
        piece = data[:2_500]
        half = piece[: len(piece) // 2]
        base = super()
        return self._perform(lambda: base.write(descriptor, piece), lambda: base.write(descriptor, half))

    def fsync(self, descriptor):
        return self._perform(lambda: super(KillingFileSystem, self).fsync(descriptor))

    def replace(self, source, target):
        return self._perform(lambda: super(KillingFileSystem, self).replace(source, target))

    def unlink(self, path):
        return self._perform(lambda: super(KillingFileSystem, self).unlink(path))

    def sync_folder(self, folder):
        return self._perform(lambda: super(KillingFileSystem, self).sync_folder(folder))


def child(folder: pathlib.Path, fatal: int, moment: str) -> None:
    """Two rounds over all keys: the second replaces, and there is not room for everything."""
    with DiskTier(folder, CAPACITY, KillingFileSystem(fatal, moment)) as tier:
        for round_number in range(2):
            for key in KEYS:
                tier.store(key, contents(round_number, key), {"round": str(round_number)})
    os._exit(0)


def inspect(folder: pathlib.Path, counts: collections.Counter) -> list[str]:
    wrong = []
    with DiskTier(folder, CAPACITY) as tier:
        for key in KEYS:
            stored = tier.retrieve(key)
            if stored is None:
                counts["misses"] += 1
                continue
            counts["hits"] += 1
            if not np.array_equal(stored.data, contents(int(stored.metadata["round"]), key)):
                wrong.append(f"{key!r} in {folder}")
        counts["incidents"] += len(tier.incidents)
        if tier.used_bytes > CAPACITY:
            wrong.append(f"{tier.used_bytes} bytes in {folder}")
        if not tier.store(b"next", contents(0, b"next")):
            wrong.append(f"{folder} takes nothing more")
    if list(folder.glob("*.partial")):
        wrong.append(f"half-written files left in {folder}")
    return wrong


def main(base: pathlib.Path) -> None:
    counts: collections.Counter = collections.Counter()
    wrong: list[str] = []
    finished = False
    fatal = 0
    while not finished:
        for moment in ("before", "middle", "after"):
            folder = base / f"{fatal}-{moment}"
            pid = os.fork()
            if pid == 0:
                child(folder, fatal, moment)
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                counts["kills"] += 1
            elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
                finished = True
            else:
                wrong.append(f"{folder}: the child ended with {status}")
                finished = True
            wrong += inspect(folder, counts)
            shutil.rmtree(folder)
        fatal += 1
    print(json.dumps({**counts, "wrong": wrong}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
