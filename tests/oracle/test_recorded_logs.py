"""Logs recorded from vLLM 0.33.0 and 0.32.0, and SGLang 0.5.23: the reference answers every line as they did."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Collection

import msgspec
import pytest

from hkv.contract import registry
from hkv.dialects.vllm.config import EARLIER, NAME
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.kinds import layer_class
from hkv.dialects.vllm.traffic.traffic import FEATURES
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import find_logs, read_log
from hkv.spec import KINDS
from reference.dialects.vllm import CHAPTERS as CHAPTER_NAMES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LOGS = sorted((ROOT / "tests" / "data" / "oplogs").glob("*.jsonl"))
EARLIER_LOGS = sorted((ROOT / "tests" / "data" / EARLIER).glob("*.jsonl"))
OFFLOAD_LOGS = [
    path for name in ("chunks", "offload") for path in sorted((ROOT / "tests" / "data" / name).glob("*.jsonl"))
]
SGLANG_LOGS = sorted((ROOT / "tests" / "data" / "sglang").glob("*.jsonl"))
MANAGER = ("dialects/vllm", "keys", "state")
CHAPTERS = tuple(f"dialects/vllm/{chapter}" for chapter in CHAPTER_NAMES)
CLASSES = (
    *("dialects/vllm/kinds/*", "dialects/vllm/offload/*"),
    *(f"dialects/vllm/{path.stem}" for path in (ROOT / "reference" / "dialects" / "vllm").glob("*.py")),
)
TOLD_APART = {*CLASSES} - {*CHAPTERS} | {"dialects/vllm/forking", "dialects/vllm/cases"}
"""Files beside vLLM's text, and those of it that no operation of a log can reach, or that only name what happens."""

OTHERS = (
    *CHAPTERS,  # which another engine runs
    "dialects/vllm/fork",  # no operation of vLLM's
    "dialects/vllm/offload/*",  # of dialects of their own
    "keys/fingerprint",
    "state/rows",  # tables on the worker's side
    "state/id_bitmap",  # another dialect's mechanisms
    "state/lru",
    "state/reference_counts",
    *(
        f"dialects/vllm/kinds/{name}" for name, cls in KINDS.items() if layer_class(cls).vllm_name is None
    ),  # kinds that it lacks
)
"""Of the folders in MANAGER, the files that no operation of a vLLM log can reach."""


@pytest.mark.parametrize("path", [*LOGS, *EARLIER_LOGS, *SGLANG_LOGS, *OFFLOAD_LOGS], ids=lambda path: path.stem)
def test_reference_agrees_with_the_engine(path: pathlib.Path) -> None:
    difference = check_log(read_log(path), engine_factory("numpy"))
    assert difference is None, difference.describe()


@pytest.mark.parametrize("path", EARLIER_LOGS, ids=lambda path: path.stem)
def test_each_log_of_an_earlier_release_shows_a_rule_that_changed(path: pathlib.Path) -> None:
    log = read_log(path)
    assert check_log(log, engine_factory("jax")) is None
    later = dataclasses.replace(log, header=msgspec.structs.replace(log.header, dialect=NAME))
    assert check_log(later, engine_factory("numpy")) is not None


def test_every_feature_is_recorded_in_every_version() -> None:
    headers = [read_log(path).header for path in LOGS]
    for feature in FEATURES:
        versions = [header.oplog for header in headers if header.feature == feature]
        assert len(versions) >= 12
        assert set(versions) >= {1, 2, 3}


UNRECORDED = {
    *("fork", "refuse/halfway"),  # no operation of vLLM's; no refusal either: it fails instead
    *("checkpoint-beyond-keys", "plan-outlives-refusal", "tail-key-outlives-state"),  # defects that end a log
}
"""Rules of vLLM's text that no log of an engine can exercise."""

UNRECORDED_OF_TIERS = {"store-what-fits", "tail-past-the-limit"}
"""The same of its offloading: a rule without the engine's defect, and a defect that ends a log."""


@pytest.mark.parametrize(
    ("name", "paths"),
    [("vllm-0.33", LOGS), ("sglang-0.5.23", SGLANG_LOGS), ("vllm-0.33/offload", OFFLOAD_LOGS)],
)
def test_every_rule_is_exercised(name: str, paths: list[pathlib.Path]) -> None:
    dialect = registry.dialect_of(name)
    seen = {rule for path in paths for rule in dialect.exercised(read_log(path))}
    unrecorded = {NAME: UNRECORDED, "vllm-0.33/offload": UNRECORDED_OF_TIERS}
    assert set(dialect.coverage) - seen == unrecorded.get(name, set())


UNREACHABLE = r"""
[report]
exclude_also =
    raise OperationError
    raise ConfigError
    raise EngineFailure
    return Status\.(UNKNOWN|NO_SUCH|NOT_|BAD_|ROW_FULL|NO_STATES)
    return status
    if (self|pool)\.records:
    if need == 0 and self.contract_of_one
    if position > len.request.keys
"""
"""Lines that no log reaches: refused operations, failures that stop an engine, requests that come with keys
only, and the two contracts that vLLM breaks without failing."""


@pytest.mark.parametrize(
    ("paths", "parts", "left", "engine", "least"),
    [
        (LOGS, MANAGER, OTHERS, "numpy", 0.95),
        (LOGS, ("dialects/vllm",), TOLD_APART, "text", 0.9),
        # An answer alone asks no invariant, and a log is no replay.
        (SGLANG_LOGS, ("dialects/sglang",), ("dialects/sglang/invariants/*", "dialects/sglang/replay"), "numpy", 0.95),
        (OFFLOAD_LOGS, ("dialects/vllm/offload",), (), "numpy", 0.9),  # none stores more than there is room for
    ],
)
def test_logs_reach_the_branches_of_the_reference(
    paths: list[pathlib.Path],
    parts: tuple[str, ...],
    left: Collection[str],
    engine: str,
    least: float,
    tmp_path: pathlib.Path,
) -> None:
    report, settings = tmp_path / "coverage.json", tmp_path / "coveragerc"
    settings.write_text(UNREACHABLE)
    sources = ",".join(str(ROOT / "reference" / part) for part in parts)
    omitted = "--omit=" + ",".join(f"*/reference/{part}.py" for part in (*left, "none"))
    coverage = [sys.executable, "-m", "coverage"]
    data, options = f"--data-file={tmp_path / 'data'}", f"--rcfile={settings}"
    check = ["-m", "hkv", "check", *sorted({str(path.parent) for path in paths}), "--engine", engine]
    run = [*coverage, "run", data, options, "--branch", f"--source={sources}", omitted, *check]
    subprocess.run(run, cwd=ROOT, check=True)
    subprocess.run([*coverage, "json", data, options, "-q", "-o", str(report)], cwd=ROOT, check=True)
    totals = json.loads(report.read_text())["totals"]
    assert totals["covered_branches"] / totals["num_branches"] >= least


def test_shared_recordings(shared_dir: pathlib.Path) -> None:
    paths = find_logs([shared_dir / "oplogs"])
    assert len(paths) >= 192
    for path in paths:
        difference = check_log(read_log(path), NumpyEngine)
        assert difference is None, difference.describe()
