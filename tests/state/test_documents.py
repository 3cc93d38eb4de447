"""`docs/state.md`: its example of a loop runs."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.state.state import State
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Sizes, Workspace
from tests.cache.build import BUCKETS, prompt, run, start

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_example_of_a_loop_counts_registered_blocks() -> None:
    code = re.findall(r"```python\n(.*?)```", (DOCS / "state.md").read_text(), re.DOTALL)
    assert len(code) == 1
    scope: dict[str, Any] = {"__name__": "example"}
    exec(code[0], scope)
    parameters, state = start()
    state, _ = run(parameters, state, prompt(Batch(), 0, range(7)).add(Code.STEP))
    want = np.count_nonzero(np.asarray(state.keys)[np.asarray(state.rows)[0, 1, :7], 0])

    @jax.jit
    def counted(state: State) -> jax.Array:
        arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
        outside = {name: jnp.int32(0) for name in (*OUTPUTS, *COUNTERS, "lane", "num_ids", "num_events", "num_copies")}
        work = Workspace(Sizes(BUCKETS, 1, 1, 1, 0, 0), **arrays, **outside)
        return scope["count_cached"](work, work.row(0, 1), 7)[1]

    assert int(counted(state)) == want > 0
