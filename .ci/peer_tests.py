"""A plugin of pytest's for `.ci/peers`: the tests that need what is provided, or a share of them, and a report as JSON.

A test that is skipped although everything that its markers name is provided fails. One that also needs something else,
such as a GPU, may be skipped.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Generator

import pytest

from tests.needs import needs_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `.ci/peers` says on pytest's command line."""
    group = parser.getgroup("peers")
    group.addoption(
        "--provides", default="", metavar="NAMES", help="markers whose needs are met here, by commas: their tests only"
    )
    group.addoption("--share", default="1/1", metavar="I/N", help="every N-th test of those chosen, from the I-th on")
    group.addoption("--report", type=pathlib.Path, metavar="FILE", help="where to write what became of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Starts to watch the run."""
    config.pluginmanager.register(Peers(config), "hkv-peers")


def share_of(names: list[str], index: int, count: int) -> set[str]:
    """The `index`-th share, counted from 1, of `count` that do not overlap and together are all names."""
    return set(sorted(names)[index - 1 :: count])


class Peers:
    """Packages that one run of pytest provides, the tests it runs, and its report."""

    def __init__(self, config: pytest.Config) -> None:
        self.provided = set(filter(None, config.getoption("--provides").split(",")))
        self.index, self.count = map(int, config.getoption("--share").split("/"))
        self.file: pathlib.Path | None = config.getoption("--report")
        self.needs: dict[str, tuple[str, ...]] = {}
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        marked = [item.nodeid for item in items if not self.provided or self.provided.intersection(needs_of(item))]
        kept = share_of(marked, self.index, self.count)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
        self.needs = {item.nodeid: needs_of(item) for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        needs = needs_of(item)
        if report.skipped and not hasattr(report, "wasxfail") and needs and self.provided.issuperset(needs):
            report.outcome = "failed"
            report.longrepr = f"skipped, although {', '.join(needs)} is provided here: {reason_of(report)}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = ("passed", "skipped", "failed")
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(before, report.outcome, key=worst.index)
        if report.skipped:
            self.reasons[report.nodeid] = reason_of(report)

    def pytest_sessionfinish(self) -> None:
        if self.file is None:
            return
        made = {"needs": self.needs, "outcomes": self.outcomes, "reasons": self.reasons}
        self.file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def reason_of(report: pytest.TestReport) -> str:
    """Reason why a test was skipped."""
    said = report.longrepr
    return said[2] if isinstance(said, tuple) else str(said)
