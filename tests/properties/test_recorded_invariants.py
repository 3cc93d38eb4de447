"""Logs that a real engine answered keep every invariant, shadow tags included."""

from __future__ import annotations

import pathlib

import pytest

from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import Watch
from hkv.oracle.log_file import read_log

LOGS = sorted((pathlib.Path(__file__).resolve().parent.parent / "data" / "oplogs").glob("*.jsonl"))


@pytest.mark.parametrize("path", LOGS[::6], ids=lambda path: path.stem)
def test_a_recorded_log_keeps_every_invariant(path: pathlib.Path) -> None:
    log = read_log(str(path))
    watch = Watch(NumpyEngine(log.header), log.header)
    for operation in log.operations:
        watch.perform(operation)
