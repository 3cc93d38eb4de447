"""The text of the page on lowering: run plainly and lowered, as the page says."""

from __future__ import annotations

import pathlib
import re
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from hkv.lowering import lowered
from reference.language import Layout
from tests.test_documents import DOCS, run_page


def test_the_text_of_the_page_runs_and_is_lowered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("docs.lowering")
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "lowering.md").read_text(), re.DOTALL)
    source = tmp_path / "lowering.py"
    source.write_text(code)
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: Any = run_page("lowering")
    vars(module).update(names)
    layout = Layout(names["Cache"])
    cache = layout.make({"blocks": 2, "waiting": 1})
    cache.front, cache.blocks[1].next = cache.blocks[1], cache.blocks[2]
    arrays = layout.arrays_of(cache)
    assert names["take"](cache, 7) is cache.blocks[1]
    got = jax.device_get(jax.jit(lowered(layout, names["take"]))(arrays, np.int32(7)))
    for name, want in layout.arrays_of(cache).items():
        assert np.array_equal(got[name][1:] if np.ndim(want) else got[name], want[1:] if np.ndim(want) else want), name
    assert (cache.taken, cache.front) == (1, cache.blocks[2])
