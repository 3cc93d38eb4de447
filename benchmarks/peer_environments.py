"""Python environments with the packages that HKV is held against: PyTorch, Triton, vLLM, LMCache, SGLang, tokamax.

Each runs on a machine without a GPU. vLLM's KV-cache core (`vllm.v1.core`, `vllm.v1.kv_cache_interface`,
`vllm.v1.request`) needs none of its kernels, so the published wheel serves, next to an older torch than it asks for.
Beside PyTorch are Triton, jax-triton and JAX's CUDA plugin, which compile for a GPU that is not there.
SGLang's wheel serves likewise; two packages that it only imports are left out (`sglang_objects.UNUSED`).
LMCache's published wheel imports CUDA, so LMCache is built from its source distribution, with its common C++ extensions
and without those for GPUs. What HKV and its tests need, JAX too, is installed next to each, and the checkout is on the
path.

An environment is complete when its stamp stands, the last file written: a hash of all that was asked of pip.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAMP = "hkv-peer.json"
TORCH = "torch==2.13.0"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A package, or several, to be held against.

    Attributes:
      name: of the peer and, in a folder of environments, of its own.
      markers: pytest markers of the tests that this environment has everything for.
      extras: of HKV, besides `test`, whose packages it needs.
      requirements: what the package imports and is built with, listed in `benchmarks/peers/NAME.txt`.
      package: arguments of `pip install` for the package itself, without its dependencies; may be empty.
      build: environment variables of that installation.
      variables: environment variables of every process that imports the package.
      trial: a program that fails unless the environment works.
      python: command of the Python that it is made with; empty for this one.
      torch: whether it has PyTorch.
    """

    name: str
    markers: tuple[str, ...]
    trial: str
    extras: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    package: tuple[str, ...] = ()
    build: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    python: str = ""
    torch: bool = True

    def installs(self, torch_options: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
        """Arguments of each `pip install`, in order; the second keeps torch as the first chose it."""
        around = (*own_requirements(("test", *self.extras)), *self.requirements)
        if not self.torch:
            return (around,)
        package = [("--no-deps", *self.package)] if self.package else []
        return ((*torch_options, TORCH), (*around, TORCH), *package)

    def key(self, torch_options: Sequence[str] = ()) -> str:
        """A hash of all that decides what the environment holds."""
        asked = [self.python or sys.version, self.installs(torch_options), sorted(self.build.items())]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def listed(name: str) -> tuple[str, ...]:
    """The requirements in `benchmarks/peers/NAME.txt`."""
    lines = (pathlib.Path(__file__).parent / "peers" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def own_requirements(extras: Iterable[str]) -> tuple[str, ...]:
    """HKV's dependencies and those of some of its extras, with the extras that they name written out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def written_out(extra: str) -> Iterator[str]:
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(r"hkv\[([\w,-]+)\]", requirement)
            if own is None:
                yield requirement
            else:
                for name in own[1].split(","):
                    yield from written_out(name)

    found = [*project["dependencies"], *(name for extra in extras for name in written_out(extra))]
    return tuple(dict.fromkeys(found))


def _vllm(name: str, marker: str, release: str) -> Peer:
    """VLLM's KV-cache core of a release; the first part of its version is the dialect's."""
    dialect = "vllm-" + release.rpartition(".")[0]
    return Peer(
        name,
        markers=(marker,),
        requirements=listed("vllm"),
        package=(f"vllm=={release}",),
        variables={
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
        trial="from hkv.oracle.engines import engine_factory; from hkv.oracle.record import Only, record; "
        f"only = Only(dialect={dialect!r}); "
        "print(len(record(engine_factory('vllm'), 'core', 0, 2, 4, only).operations), 'operations performed by vLLM')",
    )


_ALL = (
    Peer(
        "torch",
        markers=("torch", "triton", "jax_triton", "cuda_plugin", "ray"),
        extras=("gpu", "ray"),
        requirements=listed("torch"),
        # No GPU is looked for, and the plugin does not ask for cuDNN and others, which only programs that run need.
        variables={"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        trial="import importlib.metadata as m; import torch, triton; "
        "print('torch', torch.__version__, 'triton', triton.__version__, 'jax-triton', m.version('jax-triton'))",
    ),
    _vllm("vllm", "vllm", "0.33.0"),
    _vllm("vllm-0.32", "vllm_earlier", "0.32.0"),
    Peer(
        "lmcache",
        markers=("lmcache",),
        requirements=listed("lmcache"),
        # Not from pip's cache: a wheel kept from an earlier build may have been compiled against another torch.
        package=("--no-build-isolation", "--no-cache-dir", "--no-binary=lmcache", "lmcache==0.5.6"),
        build={"NO_GPU_EXT": "1", "MAX_JOBS": "2"},
        variables={"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"},
        trial="from tests.chunks import installed_lmcache as lmcache; "
        "print('LMCache found', lmcache.longest_prefix([({0, 1}, -1)], 3))",
    ),
    Peer(
        "sglang",
        markers=("sglang",),
        requirements=listed("sglang"),
        package=("sglang==0.5.23",),
        variables={"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        trial="from hkv.oracle.engines import engine_factory; from hkv.oracle.record import Only, record; "
        "only = Only(dialect='sglang-0.5.23'); "
        "print(len(record(engine_factory('sglang'), 'window', 0, 2, 4, only).operations), 'operations by SGLang')",
    ),
    Peer(
        "tokamax",
        markers=("tokamax",),
        requirements=listed("tokamax"),
        python="python3.12",
        torch=False,
        trial="import importlib.metadata as m; from tokamax._src.ops.batched_rpa import api; "
        "print('tokamax', m.version('tokamax'), 'JAX', m.version('jax'))",
    ),
    Peer(
        "page",
        markers=("browser",),
        requirements=listed("page"),
        torch=False,
        trial="from playwright.sync_api import sync_playwright; from tests.page.browser import launched\n"
        "with sync_playwright() as play: print('Chromium', launched(play).version)",
    ),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


class PeerError(Exception):
    """An environment that cannot be made or used; its message is one line."""


class NoPythonError(PeerError):
    """The Python that an environment is made with is not on this machine."""


def interpreter(folder: pathlib.Path) -> pathlib.Path:
    """The Python of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_complete(peer: Peer, folder: pathlib.Path, torch_options: Sequence[str] = ()) -> bool:
    """True if the folder holds this peer's environment as it would be made now."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(stamp, dict) and stamp.get("key") == peer.key(torch_options)


def make(
    peer: Peer, folder: pathlib.Path, torch_options: Sequence[str] = (), timeout: float | None = None
) -> pathlib.Path:
    """Makes the environment unless it is complete, puts this checkout on its path, and returns its Python.

    Args:
      peer: whose environment.
      folder: of this environment alone. What an earlier, unfinished or outdated one left there is removed first.
      torch_options: options of `pip install` for torch alone.
      timeout: seconds that each step may take at most, or None.

    Raises:
      NoPythonError: no interpreter to make it with was found.
      PeerError: the folder holds something else, or a step failed or took too long.
    """
    python = interpreter(folder)
    if not is_complete(peer, folder, torch_options):
        _check_python(peer)
        _clear(folder)
        try:
            _create(peer, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"folder = {str(folder)!r}: expected a place for an environment ({error})") from error
        for arguments in peer.installs(torch_options):
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
            _run(command, {**os.environ, **peer.build}, timeout)
        _add_checkout(python)
        _run([str(python), "-c", peer.trial], {**os.environ, **peer.variables}, timeout)
        frozen = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        stamp = {"key": peer.key(torch_options), "packages": frozen.splitlines()}
        (folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    else:
        _add_checkout(python)  # the one that made it may have been another
    return python


def _check_python(peer: Peer) -> None:
    if not peer.python:
        return
    try:  # found is not enough: what is on the path may be a stand-in for versions that are not chosen
        subprocess.run([peer.python, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoPythonError(f"not made: no {peer.python} on the path that runs") from error


def _create(peer: Peer, folder: pathlib.Path) -> None:
    if peer.python:
        subprocess.run([peer.python, "-m", "venv", str(folder)], check=True)
    else:
        venv.create(folder, with_pip=True)


def _clear(folder: pathlib.Path) -> None:
    """Removes an environment, or nothing; never a folder that is neither empty nor an environment."""
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file()):
        raise PeerError(f"folder = {str(folder)!r}: expected none, an empty one or a Python environment")
    shutil.rmtree(folder)


def _run(command: list[str], variables: Mapping[str, str], timeout: float | None) -> None:
    try:
        subprocess.run(command, env=variables, check=True, timeout=timeout)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PeerError(str(error)) from error


def _add_checkout(python: pathlib.Path) -> None:
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    pathlib.Path(site, "hkv-checkout.pth").write_text(f"{ROOT}\n", encoding="utf-8")
