"""Products in full precision: on a GPU JAX multiplies float32 in fewer bits unless it is told not to."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield
