"""Which code moves the runs: a name, or None for the best that the default device has.

| name | what it is | where it runs |
|---|---|---|
| `xla` | XLA's own gather and scatter | everywhere |
| `mosaic` | Pallas on Mosaic GPU: bulk copies through shared memory | Hopper and later |
| `pallas_triton` | Pallas on Triton, which JAX 0.11 deprecates | NVIDIA GPUs |
| `triton` | Triton itself through jax-triton, an optional extra | NVIDIA GPUs |

A name followed by `:interpret` is the same kernel interpreted on the CPU: slow, and meant for tests.
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
from hkv.paged import xla


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to gather and scatter runs of pools.

    Attributes:
      gather_runs: as `hkv.paged.xla.gather_runs`.
      scatter_runs: as `hkv.paged.xla.scatter_runs`.
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
"""What makes each implementation, by name; kernels are imported when they are first asked for."""


@functools.cache
def choose(name: str | None) -> Implementation:
    """The implementation of that name; None is `xla` on every device, until a GPU measurement says otherwise.

    Raises:
      ConfigError: there is no such implementation.
      MissingExtraError: it needs a package that cannot be imported.
    """
    if name is None:
        name = "xla"
    if name not in IMPLEMENTATIONS:
        raise ConfigError("implementation", name, f"one of {', '.join(IMPLEMENTATIONS)}, or None")
    return IMPLEMENTATIONS[name]()
