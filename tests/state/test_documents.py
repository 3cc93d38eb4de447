"""`docs/state.md`: its example of a loop runs, and its pictures show what the code draws."""

from __future__ import annotations

import pathlib
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.state.state import State
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Sizes, Workspace
from tests.cache.build import BUCKETS, prompt, run, start
from tests.scripts import load_script

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'hkv[plots]'")
    return load_script(DOCS / "pictures" / "draw_state.py")


def labels(path: pathlib.Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_pictures_are_current(pictures: ModuleType, tmp_path: pathlib.Path) -> None:
    pictures.main([str(tmp_path)])
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.name for path in drawn] == sorted(path.name for path in (DOCS / "pictures").glob("state-*.svg"))
    for path in drawn:
        assert len(labels(path)) > 10
        assert labels(path) == labels(DOCS / "pictures" / path.name)


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
