"""Distribution of tests over pytest-xdist's workers: one that has compiled a program gets the tests that share it."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/cache", "tests/step", "tests/serving", "tests/slow/step", "tests/slow/serving")
"""Folders all of whose tests run the same few programs; elsewhere a worker takes a file."""


class ProgramScheduling(LoadFileScheduling):
    """Hands out whole files, or whole folders where files share programs."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in FOLDERS else file
