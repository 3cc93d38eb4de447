"""Asserts that an environment with the wheel `hkv-layouts` has NumPy beside it alone, and that all its modules load.

  VENV/bin/python .ci/hkv-layouts/alone.py

Then `hkv-layouts` judges the examples as installed: the right connector, and the one that registers only group 0.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPECTED = {"hkv-layouts", "numpy", "pip", "setuptools"}

installed = {found.metadata["Name"].lower() for found in importlib.metadata.distributions()}
if "hkv-layouts" not in installed or not installed <= EXPECTED:
    sys.exit(f"the environment has {sorted(installed)}, expected hkv-layouts, and at most {sorted(EXPECTED)}")
files = [file for file in importlib.metadata.files("hkv-layouts") or [] if file.suffix == ".py"]
names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
for name in names:
    importlib.import_module(name)
program = pathlib.Path(sys.executable).with_name("hkv-layouts")
for function, status, begins in (
    ("block_ranges", 0, "right: "),
    ("only_group_0", 1, "wrong: group 0's size of a block"),
):
    asked = [program, f"{ROOT}/examples/connector.py:{function}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if (done.returncode, done.stdout.startswith(begins)) != (status, True):
        sys.exit(f"{function}: status {done.returncode}, {done.stdout}{done.stderr}")
print(f"{len(names)} modules of hkv-layouts load with NumPy alone, and judge the connectors of the examples")
