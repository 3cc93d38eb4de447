"""Defects of the GPU kernels, which the interpreter runs: `pallas_kernels`."""

from __future__ import annotations

from tests.mutants.row import Planted

GATHER = "tests.pallas_kernels.test_values:gather_of"
SCATTER = "tests.pallas_kernels.test_values:scatter_of"
RING = "tests.pallas_kernels.test_values:test_more_tiles_than_a_ring_has_stages"
TRITON, MOSAIC = "pallas_triton:interpret", "mosaic:interpret"


def _row(name: str, function: str, text: str, defect: str, judge: str, *arguments: str) -> Planted:
    return Planted(name, f"pallas_kernels.{function}", text, defect, judge, arguments)


INDEXER = "indexer row of 132 bytes"
TWO_ROWS = "656 bytes, runs of two rows"
NARROW = "two bytes, four rows, three pools"
TWO_POOLS = "256 bytes, two pools (bulk)"
LONG = "64 words of 4 bytes, runs of two rows (bulk)"
FLOATS = "float32 itself (bulk)"
HANGING = "5000 bytes, whose last tile hangs over"
BULK_TILES = "40 KiB, two tiles of a bulk copy (bulk)"
LATENT = "latent of 576 in words of 2 bytes (bulk)"

ROWS = (
    _row(
        "gather-reads-past-the-end",
        "gather.pallas_triton:_kernel",
        "(start <= last)",
        "(start <= last + 1)",
        GATHER,
        TRITON,
        TWO_ROWS,
    ),
    _row(
        "gather-takes-negative-rows",
        "gather.pallas_triton:_kernel",
        "(start >= 0) & (start <= last)",
        "start <= last",
        GATHER,
        TRITON,
        INDEXER,
    ),
    _row(
        "gather-from-the-first-pool",
        "gather.pallas_triton:_kernel",
        "pl.when(pool == index)",
        "pl.when(index == 0)",
        GATHER,
        TRITON,
        NARROW,
    ),
    _row(
        "gather-forgets-the-start",
        "gather.pallas_triton:place_in",
        "start + columns // row",
        "columns // row",
        GATHER,
        TRITON,
        TWO_ROWS,
    ),
    _row(
        "gather-of-the-first-tile",
        "gather.pallas_triton:_kernel",
        "tile * tiles.width + jnp.arange(tiles.width)",
        "jnp.arange(tiles.width)",
        GATHER,
        TRITON,
        HANGING,
    ),
    _row(
        "tiles-rounded-down",
        "triton_tiles:tiles_of",
        "-(-run_words // width)",
        "run_words // width",
        GATHER,
        TRITON,
        HANGING,
    ),
    _row(
        "scatter-writes-past-the-end",
        "scatter.pallas_triton:_kernel",
        "(start <= last)",
        "(start <= last + 1)",
        SCATTER,
        TRITON,
        TWO_ROWS,
    ),
    _row(
        "scatter-takes-negative-rows",
        "scatter.pallas_triton:_kernel",
        "& (start >= 0) &",
        "&",
        SCATTER,
        TRITON,
        INDEXER,
    ),
    _row(
        "scatter-without-a-mask",
        "scatter.pallas_triton:_kernel",
        "start, columns)], words, mask=mask)",
        "start, columns)], words)",
        SCATTER,
        TRITON,
        TWO_ROWS,
    ),
    _row(
        "scatter-into-the-wrong-pool",
        "scatter.pallas_triton:scatter_runs",
        "{2 + index: index for",
        "{2 + index: len(pools) - 1 - index for",
        SCATTER,
        TRITON,
        NARROW,
    ),
    _row(
        "ring-overtakes-its-loads",
        "gather.mosaic:ring",
        "store(index, lax.rem(index, NUM_STAGES))",
        "store(index, lax.rem(index + 1, NUM_STAGES))",
        RING,
        MOSAIC,
    ),
    _row(
        "bulk-gather-from-the-first-pool",
        "gather.mosaic:_body",
        "(task >= pool * tasks) & (task < (pool + 1) * tasks)",
        "(pool == 0)",
        GATHER,
        MOSAIC,
        TWO_POOLS,
    ),
    _row(
        "bulk-tiles-without-their-lines",
        "tma_tiles:TmaTiles.first_lines",
        "dtype=jnp.int32) * self.lines",
        "dtype=jnp.int32) * 0",
        GATHER,
        MOSAIC,
        BULK_TILES,
    ),
    _row(
        "bulk-line-of-the-row", "tma_tiles:TmaTiles.first_lines", "* self.lines_per_row +", "+", GATHER, MOSAIC, LATENT
    ),
)
"""Interpreted kernels are compared with loops, bit for bit."""
