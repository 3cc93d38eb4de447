"""Published byte bugs planted in kernels over JAX arrays, which have no addresses: copies go in, results come back."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.testing.kernels import check, target_of
from tests.testing.kernels.planted import PLANTED

CHANGED = {"pack": "objects", "unpack": "tensors", "gather": "_out"}
WITHOUT_ADDRESSES = [
    name for name, planted in PLANTED.items() if "buffer" not in inspect.signature(planted.kernel).parameters
]


def over_jax(kernel, operation: str):
    """The kernel as a pure function: what it changes is returned."""
    signature = inspect.signature(kernel)
    changed = [name for name in signature.parameters if name.endswith(CHANGED.get(operation, ("_cache", "_caches")))]

    @functools.wraps(kernel)
    def pure(**given):
        given = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) else leaf, given)
        found = kernel(**given)
        return jax.tree.map(jnp.asarray, tuple(given[name] for name in changed) if found is None else found)

    return pure


@pytest.mark.parametrize("name", WITHOUT_ADDRESSES)
def test_they_are_found_and_named(name: str) -> None:
    planted = PLANTED[name]
    options = {"arrays": "jax", "has": "NaN payloads"} | planted.options  # NumPy moves the bits here, not XLA
    target = target_of(over_jax(planted.kernel, planted.operation), planted.operation, **options)
    failure = check(target).failure
    assert failure is not None
    assert re.search(planted.says, failure.text.split("\n")[0]), failure.text
