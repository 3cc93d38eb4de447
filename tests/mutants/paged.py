"""Defects of bytes by block tables: `hkv/paged`."""

from __future__ import annotations

from tests.mutants.row import Planted

OPERATIONS = "tests.paged.test_operations:"
QUANTIZATION = "tests.paged.test_quantization:"


def _row(name: str, function: str, text: str, defect: str, judge: str) -> Planted:
    return Planted(name, f"hkv.paged.{function}", text, defect, judge)


ROWS = (
    _row(
        "write-drops-what-lies-outside",
        "operations:write",
        "states // layout.shape[3], states % layout.shape[3]",
        "states * 0, states % layout.shape[3]",
        OPERATIONS + "test_write",
    ),
    _row(
        "padding-counts-as-dropped",
        "operations:write",
        "(blocks != -1) & ~exists",
        "~exists",
        OPERATIONS + "test_write",
    ),
    _row(
        "state-outside-is-not-counted",
        "operations:write",
        "_inside(states, layout.states_per_block)",
        "_inside(states, 2**31 - 1)",
        OPERATIONS + "test_write",
    ),
    _row(
        "null-block-is-read",
        "operations:gather",
        "jnp.where(table == null_block, -1, table)",
        "table",
        OPERATIONS + "test_gather",
    ),
    _row(
        "null-block-is-written",
        "operations:scatter",
        "jnp.where(table == null_block, -1, table)",
        "table",
        OPERATIONS + "test_scatter",
    ),
    _row(
        "pair-without-target-is-counted",
        "operations:copy_blocks",
        "(sources == -1) | (targets == -1)",
        "(sources == -1)",
        OPERATIONS + "test_copy_blocks",
    ),
    _row(
        "copy-to-where-it-came-from",
        "operations:copy_blocks",
        "runs.start_rows(layers, jnp.where(exist, targets, -1)[None])",
        "runs.start_rows(layers, jnp.where(exist, sources, -1)[None])",
        OPERATIONS + "test_copy_blocks",
    ),
    _row(
        "zeros-in-the-first-layer",
        "operations:zero_blocks",
        "jnp.arange(layout.shape[0], dtype=jnp.int32)[:, None]",
        "jnp.zeros((layout.shape[0], 1), jnp.int32)",
        OPERATIONS + "test_zero_blocks",
    ),
    _row(
        "ids-outside-wrap",
        "operations:_inside",
        "(index >= 0) & (index < extent)",
        "index < extent",
        OPERATIONS + "test_gather",
    ),
    _row(
        "parts-of-a-cell-in-reverse",
        "operations:_cell_order",
        "key=lambda part: part.offset",
        "key=lambda part: -part.offset",
        OPERATIONS + "test_write",
    ),
    _row(
        "rows-outside-are-the-first",
        "runs:Runs.start_rows",
        "jnp.where(inside[..., None], rows, np.int32(self.num_rows))",
        "jnp.where(inside[..., None], rows, np.int32(0))",
        OPERATIONS + "test_scatter",
    ),
    _row(
        "last-unit-is-outside",
        "runs:Runs.start_rows",
        "(coordinate < extent)",
        "(coordinate < extent - 1)",
        OPERATIONS + "test_zero_blocks",
    ),
    _row("offset-is-forgotten", "runs:runs_of", "first=view.offset // row", "first=0", OPERATIONS + "test_gather"),
    _row(
        "scale-is-not-inverted",
        "quantization:quantize_per_tensor",
        "(np.float32(1) / scale)",
        "scale",
        QUANTIZATION + "test_per_tensor",
    ),
    _row(
        "row-of-zeros-has-no-scale",
        "quantization:quantize_per_token_head",
        ", 1.0).astype",
        ", 0.0).astype",
        QUANTIZATION + "test_per_token_and_head",
    ),
    _row(
        "rounded-down",
        "quantization:_convert",
        "jnp.round(without",
        "jnp.floor(without",
        QUANTIZATION + "test_per_tensor",
    ),
    _row(
        "not-saturated",
        "quantization:_convert",
        "jnp.clip(scaled, -largest, largest)",
        "scaled",
        QUANTIZATION + "test_per_tensor",
    ),
)
"""Every judge compares bytes with loops over elements."""
