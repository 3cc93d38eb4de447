"""Implementations that move the runs: a name, or None for `xla`.

| name | what it is | where it runs |
|---|---|---|
| `xla` | XLA's own gather and scatter | everywhere |
| `auto` | kernels where there is a GPU, see `implementation_for` | everywhere |
| `mosaic` | Pallas on Mosaic GPU: bulk copies through shared memory, of runs that these can move | Hopper and later |
| `pallas_triton` | Pallas on Triton, which JAX 0.11 deprecates | NVIDIA GPUs |
| `triton` | Triton itself through jax-triton, an optional extra | NVIDIA GPUs |

A kernel that is named and cannot run on the device, or cannot move a pool's runs, is refused when it is traced; only
`auto` chooses. A name followed by `:interpret` is the same kernel interpreted on the CPU: slow, and meant for tests.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax

from hkv.errors import ConfigError, MissingExtraError
from hkv.layout.views import xla
from hkv.paged.target import Target, traced_for
from pallas_kernels.tma_tiles import LINE_MULTIPLE_BYTES, TILE_MULTIPLE_BYTES, TmaTiles, tma_tiles
from pallas_kernels.triton_tiles import addressable


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to gather and scatter runs of pools.

    Attributes:
      gather_runs: as `hkv.layout.views.xla.gather_runs`.
      scatter_runs: as `hkv.layout.views.xla.scatter_runs`.
    """

    gather_runs: Callable[[tuple[jax.Array, ...], jax.Array, int], jax.Array]
    scatter_runs: Callable[[tuple[jax.Array, ...], jax.Array, jax.Array], tuple[jax.Array, ...]]

    def gather(self, rows: jax.Array, starts: jax.Array, rows_per_run: int) -> jax.Array:
        """Runs `[n, runs, rows_per_run, row]` of one pool, by int32 `[n, runs]`."""
        return self.gather_runs((rows,), starts[None], rows_per_run)[0]

    def scatter(self, rows: jax.Array, starts: jax.Array, values: jax.Array) -> jax.Array:
        """One pool with runs `[n, runs, rows_per_run, row]` replaced, by int32 `[n, runs]`."""
        return self.scatter_runs((rows,), starts[None], values[None])[0]


def _kernels(name: str, interpret: Any = False) -> Implementation:
    gather = importlib.import_module(f"pallas_kernels.gather.{name}")
    scatter = importlib.import_module(f"pallas_kernels.scatter.{name}")
    return Implementation(
        functools.partial(gather.gather_runs, interpret=interpret),
        functools.partial(scatter.scatter_runs, interpret=interpret),
    )


def _mosaic_interpreter() -> Any:
    public = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    if hasattr(public, "InterpretGPUParams"):
        return public.InterpretGPUParams()
    # JAX 0.10 has it, but not yet under its public name.
    return importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params").InterpretGPUParams()


def _triton() -> Implementation:
    try:
        gather = importlib.import_module("pallas_kernels.gather.triton")
        scatter = importlib.import_module("pallas_kernels.scatter.triton")
    except ImportError as error:
        # jax-triton 0.3 refuses to be imported where JAX has no GPU support, which is an ImportError as well.
        raise MissingExtraError(error.name or "jax_triton", "gpu", f"implementation='triton' ({error})") from error
    return Implementation(gather.gather_runs, scatter.scatter_runs)


IMPLEMENTATIONS: MappingProxyType[str, Callable[[], Implementation]] = MappingProxyType(
    {
        "xla": lambda: Implementation(xla.gather_runs, xla.scatter_runs),
        "mosaic": lambda: _kernels("mosaic"),
        "pallas_triton": lambda: _kernels("pallas_triton"),
        "triton": _triton,
        "mosaic:interpret": lambda: _kernels("mosaic", _mosaic_interpreter()),
        "pallas_triton:interpret": lambda: _kernels("pallas_triton", True),
    }
)
"""Constructors of the implementations, by name; kernels are imported when they are first asked for."""


AUTO = "auto"
"""The name that leaves the choice to `implementation_for`."""


def choose(name: str | None) -> Implementation:
    """The implementation of that name, which is checked against device and runs when it is traced.

    Args:
      name: one of `IMPLEMENTATIONS`, `auto`, or None, which is `xla` on every device until a GPU measurement says
        otherwise.

    Raises:
      ConfigError: there is no such implementation.
      MissingExtraError: it needs a package that cannot be imported.
    """
    if name is not None:
        _check_name(name)
    if name in IMPLEMENTATIONS:
        _load(name)  # says which package is missing now, and not when the program is traced
    return Implementation(functools.partial(_gather_runs, name), functools.partial(_scatter_runs, name))


def implementation_for(name: str | None, pool: jax.Array | jax.ShapeDtypeStruct, rows_per_run: int) -> str:
    """Name of the implementation that moves runs of a pool, on the device that the program is traced for.

    `auto` is `mosaic` on Hopper and later for runs that bulk copies can move, `pallas_triton` for other runs and GPUs,
    and `xla` where there is no GPU, or where the pool is one that `pallas_triton` cannot address. Every other name is
    itself: a kernel that was asked for by name is never replaced.

    Args:
      name: as in `choose`.
      pool: words `[rows, row]`, or their shape and dtype.
      rows_per_run: rows in a run.

    Raises:
      ConfigError: there is no such implementation, or it cannot run on the device or move the runs.
    """
    if name is None:
        return "xla"
    _check_name(name)
    target = traced_for()
    if name == AUTO:
        if target.platform != "gpu":
            return "xla"
        if _has_bulk_copies(target) and _tiles(pool, rows_per_run) is not None:
            return "mosaic"
        return "pallas_triton" if addressable(pool) else "xla"
    if name in ("mosaic", "pallas_triton", "triton") and target.platform != "gpu":
        raise ConfigError("implementation", name, f"{_needs(name)}, not {target}; {_ELSEWHERE}")
    if name == "mosaic" and not _has_bulk_copies(target):
        raise ConfigError("implementation", name, f"{_needs(name)}, not {target}; 'auto' takes what there is")
    if name.startswith("mosaic") and _tiles(pool, rows_per_run) is None:
        row = pool.shape[1] * pool.dtype.itemsize
        raise ConfigError("implementation", name, f"{_BULK}, not runs of {rows_per_run} x {row} bytes; {_OTHER_RUNS}")
    return name


_ELSEWHERE = "'xla' runs everywhere, 'auto' takes what there is"
_OTHER_RUNS = "'auto' leaves those to pallas_triton"
_BULK = (
    f"runs that bulk copies can move, in lines of a multiple of {LINE_MULTIPLE_BYTES} bytes and tiles of a multiple of "
    f"{TILE_MULTIPLE_BYTES}"
)


def _needs(name: str) -> str:
    return "a Hopper GPU (compute capability 9.0) or later" if name == "mosaic" else "a GPU"


def _has_bulk_copies(target: Target) -> bool:
    # A GPU that is only described says what to lower for, and no more: it is taken to be what kernels are written for.
    return target.platform == "gpu" and (target.capability is None or target.capability >= (9, 0))


def _tiles(pool: jax.Array | jax.ShapeDtypeStruct, rows_per_run: int) -> TmaTiles | None:
    return tma_tiles(pool.shape[1], rows_per_run, pool.dtype.itemsize)


def _check_name(name: str) -> None:
    if name not in (*IMPLEMENTATIONS, AUTO):
        raise ConfigError("implementation", name, f"one of {', '.join(IMPLEMENTATIONS)}, {AUTO}, or None")


@functools.cache
def _load(name: str) -> Implementation:
    return IMPLEMENTATIONS[name]()


def _gather_runs(name: str | None, pools: tuple[jax.Array, ...], starts: jax.Array, rows_per_run: int) -> jax.Array:
    return _load(implementation_for(name, pools[0], rows_per_run)).gather_runs(pools, starts, rows_per_run)


def _scatter_runs(
    name: str | None, pools: tuple[jax.Array, ...], starts: jax.Array, values: jax.Array
) -> tuple[jax.Array, ...]:
    return _load(implementation_for(name, pools[0], values.shape[3])).scatter_runs(pools, starts, values)
