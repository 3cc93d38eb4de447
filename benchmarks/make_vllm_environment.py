"""Makes a Python environment with vLLM 0.33.0 on CPU, beside HKV, so that engines can be held against the real one.

vLLM's KV-cache core (`vllm.v1.core`, `vllm.v1.kv_cache_interface`, `vllm.v1.request`) needs none of its kernels: the
published wheel runs on a machine without a GPU. pip reports that versions conflict (vLLM asks for a newer torch); the
core runs all the same. The environment takes about 1.5 GB.

Example:
  python benchmarks/make_vllm_environment.py build/vllm
  build/vllm/bin/python -m hkv diff --engines numpy,vllm --seeds 500
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent

TORCH = "torch==2.13.0"
VLLM = "vllm==0.33.0"
NEEDED = pathlib.Path(__file__).with_name("vllm-requirements.txt")
OURS = ("click>=8.1", "rich>=13.9", "pytest>=8.3", "hypothesis>=6.120", "jsonschema>=4.23", "coverage>=7.6")
"""What HKV's commands and tests need there; JAX is not among it."""

TRIAL = (
    "from hkv.oracle.engines import engine_factory; from hkv.oracle.record import record; "
    "print(len(record(engine_factory('vllm'), 'core', 0, 2, 4).operations), 'operations performed by vLLM')"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to make the environment; must not exist")
    parser.add_argument(
        "--torch-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of `pip install` for torch alone, such as the index that has its CPU builds; repeatable. "
        "Without one, pip may fetch a build with several GB of CUDA packages, which works as well",
    )
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if folder.exists():
        print(f"make_vllm_environment: folder = {str(folder)!r}: expected one that does not exist", file=sys.stderr)
        return 2
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    try:
        for packages in ((*arguments.torch_option, TORCH), ("--no-deps", VLLM), ("-r", str(NEEDED), *OURS)):
            subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", *packages], check=True)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        pathlib.Path(site, "hkv-checkout.pth").write_text(f"{ROOT}\n", encoding="utf-8")
        subprocess.run([python, "-c", TRIAL], check=True)
    except subprocess.CalledProcessError as error:
        print(f"make_vllm_environment: exit status {error.returncode} from {error.cmd}", file=sys.stderr)
        return 1
    print(f"{python} -m hkv diff --engines numpy,vllm --seeds 50")
    return 0


if __name__ == "__main__":
    sys.exit(main())
