"""Fixtures of what holds for every command: a folder of inputs, and an explorer that compiles nothing."""

from __future__ import annotations

import pytest

from hkv.dialects.vllm.explorer import Counterexample, Report
from hkv.oracle.log_file import read_log
from tests.cli.commands import Inputs, make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, inputs: Inputs) -> None:
    """The explorer's search finds something at once: compiling it takes ten seconds, and is tested elsewhere."""
    log = read_log(inputs.log)

    def explore(*_: object, report: Report, **__: object) -> Report:
        report.seconds = 1.0
        report.counterexample = Counterexample(("retirement",), log.header, log.operations)
        return report

    monkeypatch.setattr("hkv.dialects.vllm.explore_command.explore", explore)
