"""vLLM 0.33's own tests under observation, and what HKV says of the logs of the cache managers that they make.

TESTS is the folder `tests` of vLLM's source distribution (`pip download --no-deps --no-binary vllm vllm==0.33.0`). It
is copied, so that the installed vLLM is what is tested. Models' configurations that the tests read may be given as
folders, `facebook/opt-125m` and so on. Prints how many managers there were, how many are in a log, how many of those
are complete and agree with each engine, and why the others do not; tests that fail do so with and without HKV, and only
their number is told.

Example: python benchmarks/attach_own_tests.py vllm-0.33.0/tests --engines numpy,jax
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from hkv.machine import native_loops

native_loops.enable()

from hkv.contract.log import Log  # noqa: E402
from hkv.dialects.vllm.log.structs import EndOp  # noqa: E402
from hkv.oracle.check import check_log  # noqa: E402
from hkv.oracle.engines import engine_factory  # noqa: E402
from hkv.oracle.log_file import find_logs, read_log  # noqa: E402

SELECTED = "tests/v1/core"
LEFT_OUT = ("tests/v1/core/test_scheduler_e2e.py", "tests/v1/core/test_reset_prefix_cache_e2e.py")
"""Tests that load weights."""


def run_tests(tests: pathlib.Path, models: pathlib.Path | None, logs: pathlib.Path, selected: Sequence[str]) -> str:
    """Runs pytest in a copy of the tests, models' configurations beside it, and returns its last line."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(tests, pathlib.Path(folder, "tests"))
        for owner in models.iterdir() if models is not None else ():
            if owner.is_dir() and owner.name != "tests":
                pathlib.Path(folder, owner.name).symlink_to(owner)
        settings = json.dumps({"folder": str(logs), "states": "step"})
        command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
        command += ["-p", "hkv.testing.plugin", "--hkv-attach", settings, *selected]
        command += [f"--ignore={path}" for path in LEFT_OUT]
        variables = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    if not logs.is_dir():
        sys.exit(f"no cache manager was observed; pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def verdicts(logs: pathlib.Path, engines: Sequence[str]) -> dict[str, Any]:
    """Figures of a folder of logs."""
    refused = (logs / "refused.txt").read_text().splitlines() if (logs / "refused.txt").exists() else []
    found = [read_log(path) for path in find_logs([str(logs)])]
    complete = [log for log in found if not _reason(log)]
    reasons = collections.Counter(_kind(_reason(log)) for log in found if _reason(log))
    reasons.update(f"refused: {_kind(line.split(chr(9))[-1])}" for line in refused)
    agree = {name: sum(check_log(log, engine_factory(name)) is None for log in complete) for name in engines}
    return {
        "managers": len(found) + len(refused),
        "logs": len(found),
        "complete": len(complete),
        "agree": agree,
        "reasons": dict(reasons.most_common()),
    }


def _reason(log: Log) -> str:
    """The reason for which a log ended before its cache did; empty if it is complete."""
    return next((op.reason for op in reversed(log.operations) if isinstance(op, EndOp)), "")


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return re.sub(r"\d+", "N", reason)[:100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=pathlib.Path, help="the folder `tests` of vLLM's source distribution")
    parser.add_argument("--models", type=pathlib.Path, help="a folder of models' files, OWNER/NAME/config.json")
    parser.add_argument("--select", action="append", help=f"tests to run, as pytest names them ({SELECTED})")
    parser.add_argument("--engines", default="numpy", help="engines that the logs are held against, by commas")
    parser.add_argument("--logs", type=pathlib.Path, help="keep the logs in this folder, which must not exist")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not (options.tests / "v1").is_dir():
        parser.error(f"TESTS: {options.tests}: expected the folder tests of vLLM's source distribution")
    if options.logs is not None and options.logs.exists():
        parser.error(f"--logs: {options.logs} exists")
    engines, models = options.engines.split(","), options.models and options.models.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        logs = (options.logs or pathlib.Path(temporary, "logs")).resolve()
        ended = run_tests(options.tests.resolve(), models, logs, options.select or [SELECTED])
        report = {"pytest": ended, **verdicts(logs, engines)}
    if options.json:
        print(json.dumps(report))
    else:
        print(f"pytest: {ended}")
        print(f"{report['managers']} managers, {report['logs']} in a log, {report['complete']} logs complete")
        for name, count in report["agree"].items():
            print(f"{count} of {report['complete']} agree with {name}")
        for reason, count in report["reasons"].items():
            print(f"{count:5} {reason}")
    return int(any(count != report["complete"] for count in report["agree"].values()))


if __name__ == "__main__":
    sys.exit(main())
