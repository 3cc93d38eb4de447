"""HKV's own operations as `hkv check-kernel` calls them."""

from __future__ import annotations

import pytest

from hkv.testing.kernels import check, target_of

OPERATIONS = {
    "write": "write",
    "gather": "gather",
    "scatter": "scatter",
    "copy_blocks": "copy_blocks",
    "zero_blocks": "zero",
    "attention": "attention",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_pages(name: str) -> None:
    has = () if name == "attention" else ("missing ids", "NaN payloads")
    verdict = check(target_of(f"hkv.paged:{name}", OPERATIONS[name], has=has, reuse=10), 60)
    assert verdict.failure is None
    assert verdict.asked == 60


@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_transfers_of_chunks(name: str) -> None:
    assert check(target_of(f"hkv.chunks.transfer:{name}", name, arrays="jax", reuse=10), 60).failure is None
