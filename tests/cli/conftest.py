"""Fixtures of what holds for every command: inputs, vectors that are made once, an explorer that compiles nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.explorer import Counterexample, Report
from hkv.oracle import vectors
from hkv.oracle.log_file import read_log
from tests.cli.commands import Inputs, make_inputs, run


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run`, given what it needs."""
    return functools.partial(run, monkeypatch, capsys)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


MAKE_DOCUMENTS = vectors.documents


@functools.cache
def documents() -> tuple[tuple[str, dict[str, Any]], ...]:
    """The content of all vectors, which is always the same, and only read."""
    return tuple(MAKE_DOCUMENTS())


@pytest.fixture(autouse=True)
def vectors_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them takes half a second, and `tests/oracle/test_vectors.py` is about them; here they are written."""
    monkeypatch.setattr(vectors, "documents", documents)


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, inputs: Inputs) -> None:
    """The explorer's search finds something at once: compiling it takes ten seconds, and is tested elsewhere."""
    log = read_log(inputs.log)

    def explore(*_: object, report: Report, **__: object) -> Report:
        report.seconds = 1.0
        report.counterexample = Counterexample(("retirement",), log.header, log.operations)
        return report

    monkeypatch.setattr("hkv.dialects.vllm.explore_command.explore", explore)
    monkeypatch.setattr("hkv.dialects.vllm.explore_command.JaxEngine", NumpyEngine)
