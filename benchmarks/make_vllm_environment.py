"""Makes a Python environment with vLLM 0.33.0, or 0.32.0, on CPU, beside HKV: engines can be held against the real one.

vLLM's KV-cache core needs none of its kernels: the published wheel runs on a machine without a GPU. pip reports that
versions conflict (vLLM asks for a newer torch); the core runs all the same. JAX is installed as well. The environment
takes 2 to 5 GB. What is installed is said in `peer_environments.py`; `.ci/peers` makes the same one and runs the tests.

Example:
  python benchmarks/make_vllm_environment.py build/vllm
  build/vllm/bin/python -m hkv diff --engines numpy,vllm --seeds 500
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from peer_environments import PEERS, PeerError, make

TORCH_OPTION = (
    "an option of `pip install` for torch alone, such as the index that has its CPU builds; repeatable. "
    "Without one, pip may fetch a build with several GB of CUDA packages, which works as well"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to make the environment; must not exist")
    parser.add_argument("--torch-option", action="append", default=[], metavar="OPTION", help=TORCH_OPTION)
    parser.add_argument("--release", choices=("0.33", "0.32"), default="0.33", help="of vLLM (%(default)s)")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if folder.exists():
        print(f"make_vllm_environment: folder = {str(folder)!r}: expected one that does not exist", file=sys.stderr)
        return 2
    try:
        python = make(PEERS["vllm" if arguments.release == "0.33" else "vllm-0.32"], folder, arguments.torch_option)
    except PeerError as error:
        print(f"make_vllm_environment: {error}", file=sys.stderr)
        return 1
    print(f"{python} -m hkv diff --dialect vllm-{arguments.release} --engines numpy,vllm --seeds 50")
    return 0


if __name__ == "__main__":
    sys.exit(main())
