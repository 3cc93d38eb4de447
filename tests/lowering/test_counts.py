"""Parts of programs: loops, segments, lines of HLO, copies. A figure that grows is compile time."""

from __future__ import annotations

import pytest

from reference.language import Layout
from tests.lowering import harness, small, test_exhaustive, test_rings, test_traps

LIMITS = {
    # loops, segments, lines; no program copies an array
    "exhaustive": (9, 11, 3100),
    "rings": (6, 3, 1400),
    "return inside loops": (4, 2, 850),
    "the right side of and": (1, 2, 450),
    "break of a loop over a tuple": (1, 2, 500),
    "many writes": (1, 0, 460),
}
SIZES = {
    "exhaustive": {"items": 200, "free.free": 256, "heap.items": 202},
    "rings": {"ops": 200, "small.free": 128, "large.free": 256, "taken": 400},
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_program_is_no_larger(name):
    if name in SIZES:
        module = harness.module_of({"exhaustive": test_exhaustive, "rings": test_rings}[name].SOURCE)
        rule, numbers = (module.perform, (0, 1, 1)) if name == "exhaustive" else (module.perform_all, (9,))
    else:
        module = small.text(test_traps.body(name))
        rule, numbers = module.rule, (5,)
    layout = Layout(module.Cache)
    program = harness.compiled(layout, rule, layout.arrays_of(layout.make(SIZES.get(name, small.SIZES))), *numbers)
    found, (loops, segments, lines) = harness.counts(program), LIMITS[name]
    limits = {"loops": loops, "segments": segments, "lines": lines, "copies": 0}
    assert all(found[each] <= limits[each] for each in limits), found
