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
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import ConfigError, MissingExtraError
from hkv.layout.views.runs import gather_runs, scatter_runs
from hkv.paged.words import Target, traced_for
from pallas_kernels.move import runs
from pallas_kernels.move.batching import MOST_UNITS, batched
from pallas_kernels.move.moves import Move, last_start
from pallas_kernels.tma_tiles import LINE_MULTIPLE_BYTES, TILE_MULTIPLE_BYTES, WORTHWHILE_BYTES, common_tiles
from pallas_kernels.triton_tiles import addressable


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to move runs between arrays of words, as `pallas_kernels.move.pallas_triton.move_runs` does."""

    move_runs: Callable[[Sequence[jax.Array], Sequence[Any], Sequence[Move]], tuple[jax.Array, ...]]

    def gather_runs(self, pools: Sequence[jax.Array], starts: jax.Array, rows_per_run: int) -> jax.Array:
        """Runs of several pools of one shape, as `hkv.layout.views.runs.gather_runs`."""
        return runs.gather_runs(self.move_runs, pools, starts, rows_per_run)

    def scatter_runs(self, pools: Sequence[jax.Array], starts: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
        """Several pools of one shape with runs replaced, as `hkv.layout.views.runs.scatter_runs`."""
        return runs.scatter_runs(self.move_runs, pools, starts, values)

    def gather(self, rows: jax.Array, starts: jax.Array, rows_per_run: int) -> jax.Array:
        """Runs `[n, runs, rows_per_run, row]` of one pool, by int32 `[n, runs]`."""
        return self.gather_runs((rows,), starts[None], rows_per_run)[0]

    def scatter(self, rows: jax.Array, starts: jax.Array, values: jax.Array) -> jax.Array:
        """One pool with runs `[n, runs, rows_per_run, row]` replaced, by int32 `[n, runs]`."""
        return self.scatter_runs((rows,), starts[None], values[None])[0]


def _kernels(name: str, interpret: Any = False) -> Implementation:
    module = importlib.import_module(f"pallas_kernels.move.{name}")
    return Implementation(batched(functools.partial(module.move_runs, interpret=interpret)))


def _mosaic_interpreter() -> Any:
    public = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    if hasattr(public, "InterpretGPUParams"):
        return public.InterpretGPUParams()
    # JAX 0.10 has it, but not yet under its public name, nor the zeros that a bulk copy reads past the end.
    private = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return private.InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")


def _triton() -> Implementation:
    try:
        module = importlib.import_module("pallas_kernels.move.triton")
    except ImportError as error:
        # jax-triton 0.3 refuses to be imported where JAX has no GPU support, which is an ImportError as well.
        raise MissingExtraError(error.name or "jax_triton", "gpu", f"implementation='triton' ({error})") from error
    return Implementation(batched(module.move_runs))


IMPLEMENTATIONS: MappingProxyType[str, Callable[[], Implementation]] = MappingProxyType(
    {
        "xla": lambda: Implementation(move_runs),
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
      name: one of `IMPLEMENTATIONS`, `auto`, or None, which is `xla` on every device: no kernel was measured to be much
        faster but for copies of blocks that do not overlap (`copy_blocks`).

    Raises:
      ConfigError: there is no such implementation.
      MissingExtraError: it needs a package that cannot be imported.
    """
    if name is not None:
        _check_name(name)
    if name in IMPLEMENTATIONS:
        _load(name)  # says which package is missing now, and not when the program is traced
    return Implementation(functools.partial(_move_runs, name))


def implementation_of_moves(
    name: str | None,
    arrays: Sequence[jax.Array | jax.ShapeDtypeStruct],
    units: Sequence[int],
    lengths: Sequence[int],
    paged: bool = False,
) -> str:
    """Name of the implementation that moves runs between arrays, on the device that the program is traced for.

    `auto` is `mosaic` on Hopper and later for runs that bulk copies can move in tiles of `WORTHWHILE_BYTES` and more,
    `pallas_triton` for other runs and GPUs, and `xla` where there is no GPU, where runs are found by page (`paged`), or
    where an array is one that `pallas_triton` cannot address. Every other name is itself: a kernel that was asked for
    by name is never replaced. Arrays are of one dtype, but for numbers that are quantised, which come last; `units` are
    the words that starts count and `lengths` the words of a run, for each kind of runs.
    """
    if name is None:
        return "xla"
    _check_name(name)
    target, word = traced_for(), np.dtype(arrays[0].dtype).itemsize
    tiles = common_tiles(units, lengths, word) if lengths else None
    bulk = tiles is not None or not lengths
    if name == AUTO:
        if target.platform != "gpu" or paged:
            return "xla"
        large = not lengths or (tiles is not None and tiles[0].words * tiles[0].lines * word >= WORTHWHILE_BYTES)
        if _has_bulk_copies(target) and large:
            return "mosaic"
        return "pallas_triton" if all(map(addressable, arrays)) else "xla"
    if paged and name != "xla":
        raise ConfigError("implementation", name, f"xla for a pool of more than {MOST_UNITS} rows; 'auto' takes it")
    if name in ("mosaic", "pallas_triton", "triton") and target.platform != "gpu":
        raise ConfigError("implementation", name, f"{_needs(name)}, not {target}; {_ELSEWHERE}")
    if name == "mosaic" and not _has_bulk_copies(target):
        raise ConfigError("implementation", name, f"{_needs(name)}, not {target}; 'auto' takes what there is")
    if name.startswith("mosaic") and not bulk:
        kinds = ", ".join(f"{n // u} x {u * word} bytes" for u, n in sorted(set(zip(units, lengths, strict=True))))
        raise ConfigError("implementation", name, f"{_BULK}, not runs of {kinds}; {_OTHER_RUNS}")
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
    # A GPU that is only described has no capability: it is assumed to be one that the kernels support.
    return target.platform == "gpu" and (target.capability is None or target.capability >= (9, 0))


def _check_name(name: str) -> None:
    if name not in (*IMPLEMENTATIONS, AUTO):
        raise ConfigError("implementation", name, f"one of {', '.join(IMPLEMENTATIONS)}, {AUTO}, or None")


@functools.cache
def _load(name: str) -> Implementation:
    return IMPLEMENTATIONS[name]()


def _moved(
    name: str, sources: Sequence[jax.Array], targets: Sequence[Any], moves: Sequence[Move]
) -> tuple[jax.Array, ...]:
    """All moves by the implementation of that name, what it cannot quantise being quantised before."""
    if any(move.dtype for move in moves) and not _quantises(name):
        sources, moves = _quantised_before(sources, moves)
    return _load(name).move_runs(sources, targets, moves)


def _quantises(name: str) -> bool:
    """True if the implementation makes numbers of a byte as it moves them, on the device that is traced for."""
    target = traced_for()
    # Triton has no eight-bit floats of three mantissa bits for older GPUs.
    fits = target.platform != "gpu" or target.capability is None or target.capability >= (8, 9)
    return name == "xla" or (name.startswith("pallas_triton") and fits)


def _quantised_before(sources: Sequence[jax.Array], moves: Sequence[Move]) -> tuple[list[jax.Array], list[Move]]:
    """Sources quantised in a pass of their own, and moves of what that makes."""
    found, plain = list(sources), []
    for move in moves:
        if move.reciprocal is not None and move.source is not None:
            numbers = found[move.source].reshape(move.runs, move.length)
            words = move.quantised(numbers, move.reciprocal[:, None], jnp.round)
            found[move.source] = words.reshape(-1)
        plain.append(dataclasses.replace(move, reciprocal=None, dtype=""))
    return found, plain


def _move_runs(
    name: str | None, sources: Sequence[jax.Array], targets: Sequence[Any], moves: Sequence[Move]
) -> tuple[jax.Array, ...]:
    """All moves by one implementation; with `auto`, those of each kind of runs by the one for it, a launch each."""
    arrays = [*targets, *sources]

    def chosen(some: Sequence[Move]) -> str:
        moved = [move for move in some if move.runs and move.length]
        units, lengths = [move.unit for move in moved], [move.length for move in moved]
        found = implementation_of_moves(name, arrays, units, lengths, any(move.page for move in moved))
        if name == AUTO and found == "mosaic" and any(move.dtype for move in moved):
            return "pallas_triton" if all(map(addressable, arrays)) else "xla"
        return found

    each = [chosen([move]) for move in moves] if name == AUTO else []
    if len(set(each)) < 2:
        return _moved(chosen(moves), sources, targets, moves)
    found = list(targets)
    for implementation in sorted(set(each)):
        some = [move for move, its in zip(moves, each, strict=True) if its == implementation]
        used = sorted({move.target for move in some})
        some = [dataclasses.replace(move, target=used.index(move.target)) for move in some]
        moved = _moved(implementation, sources, [found[index] for index in used], some)
        for index, array in zip(used, moved, strict=True):
            found[index] = array
    return tuple(found)


# `move_runs` by plain XLA: each move a gather that a GPU's compiler fuses into the scatter of its values.


def move_runs(
    sources: Sequence[jax.Array], targets: Sequence[jax.Array | jax.ShapeDtypeStruct], moves: Sequence[Move]
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.move.pallas_triton.move_runs`; a launch for each move.

    A target that is read as well is read into an array of its own: XLA would copy all of it first.
    """
    found = list(targets)
    for move in moves:
        target = found[move.target]
        source = move.array(sources, found)
        if isinstance(target, jax.ShapeDtypeStruct):
            found[move.target] = _read(source, move).reshape(target.shape)
            continue
        words, starts = _read(source, move), _written(source, target.size, move)
        if move.reciprocal is not None:
            words = move.quantised(words, move.reciprocal[:, None], jnp.round)
        rows = _rows(target, move, starts)
        if move.own:
            words, rows = jax.lax.optimization_barrier((words, rows))
        values = words.reshape(1, move.runs, 1, move.length // move.unit, move.unit)
        rows = scatter_runs([rows], _of_runs(starts), values)[0]
        found[move.target] = rows.reshape(target.shape)
    return tuple(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t for t in found)


def _read(source: jax.Array, move: Move) -> jax.Array:
    """Words `[runs, length]`, zeros for runs outside."""
    if not move.reads:
        return jnp.zeros((move.runs, move.length), source.dtype)
    if move.read is None:
        return source.reshape(-1)[: move.runs * move.length].reshape(move.runs, move.length)
    rows, starts = _rows(source, move, move.read), _of_runs(move.read)
    return gather_runs([rows], starts, move.length // move.unit).reshape(move.runs, move.length)


def _rows(array: jax.Array, move: Move, starts: jax.Array) -> jax.Array:
    """`[units, unit]`, or `[pages, units of a page, unit]` where starts have two numbers."""
    return array.reshape(*((-1, move.page) if starts.ndim == 2 else (-1,)), move.unit)


def _of_runs(starts: jax.Array) -> jax.Array:
    """Starts of runs as those of units of one run each, of one array."""
    return starts[None, :, None]


def _written(source: jax.Array, size: int, move: Move) -> jax.Array:
    """Int32 `[runs]` or `[runs, 2]`, where each run goes; outside for those of which nothing is to be moved."""
    step = move.length // move.unit
    starts = jnp.arange(move.runs, dtype=jnp.int32) * step if move.written is None else move.written
    if not move.reads or move.read is None or move.zeros:
        return starts
    if move.read.ndim == 2:
        here = (move.read[:, 0] >= 0) & (move.read[:, 0] < source.size // (move.page * move.unit))
    else:
        here = (move.read >= 0) & (move.read <= last_start(source.size, move))
    paged = starts.ndim == 2
    outside = size // move.unit // (move.page if paged else 1)
    return jnp.where(here[:, None] if paged else here, starts, outside)
