"""Distribution of tests over pytest-xdist's workers: one that has compiled a program gets the tests that share it."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/cache", "tests/step", "tests/serving", "tests/slow/step", "tests/slow/serving")
"""Folders all of whose tests run the same few programs; elsewhere a worker takes a file."""

FIRST = (
    *FOLDERS,
    "tests/examples/test_c_engine.py",
    *("tests/examples/test_checking_your_engine.py", "tests/examples/test_toy_dialect.py"),
    *("tests/cli/test_hostile_inputs.py", "tests/attach/test_processes.py", "tests/chunks/test_transfer.py"),
    *("tests/slow/sharding/test_on_eight_devices.py", "tests/slow/test_mutants.py"),
    *("tests/slow/sharding/test_processes.py", "tests/slow/examples/test_latter_half.py"),
    *("tests/slow/examples/test_changed_rule.py", "tests/slow/optimized/replay/test_processes.py"),
)
"""Few tests that take long: begun last, as pytest-xdist begins the smallest files, they would leave a worker idle."""


class ProgramScheduling(LoadFileScheduling):
    """Hands out whole files, or whole folders where files share programs; those of `FIRST` first."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in FOLDERS else file

    def _assign_work_unit(self, node: Any) -> None:
        slow = next((scope for scope in FIRST if scope in self.workqueue), None)
        if slow is not None:
            self.workqueue.move_to_end(slow, last=False)
        super()._assign_work_unit(node)
