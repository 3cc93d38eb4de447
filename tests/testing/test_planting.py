"""Patches fit once or not at all, and are taken back."""

from __future__ import annotations

import pytest

from hkv.errors import OperationError
from hkv.testing.planting import Patch, applied
from reference import slots
from reference.state.free_queue import FreeQueue

POP = "reference.state.free_queue:FreeQueue.pop"


def test_a_patch_runs_and_is_taken_back():
    queue = FreeQueue([1, 2, 3])
    with applied(Patch(POP, "last=False", "last=True")):
        assert queue.pop() == 3
    assert queue.pop() == 1


def test_a_patch_reaches_jitted_functions():
    from hkv.cache import step

    patch = Patch("hkv.cache.step:find", "jnp.where(same, age, 0)", "jnp.where(same, 1, 0)")
    assert patch.function() is step.find.__wrapped__
    patch.code()


def test_a_patch_is_taken_back_when_the_block_fails():
    with pytest.raises(KeyError), applied(Patch(POP, "last=False", "last=True")):
        raise KeyError
    assert FreeQueue([1, 2]).pop() == 1


def test_a_patch_reaches_properties_and_methods_that_call_super():
    patch = Patch("reference.dialects.vllm.kinds.mamba:MambaKind.register", "if self.aligned:", "if not self.aligned:")
    assert patch.code().co_freevars == ("__class__",)
    assert Patch("hkv.layout.block_layout:Layout.states_per_block", "*", "+").function().__name__ == "states_per_block"


def test_two_edits_of_one_function_are_applied_together():
    target = "reference.slots:place"
    edits = (Patch(target, "geometry.ranks)\n    deal", "geometry.ranks)\n    deal"),)
    with pytest.raises(OperationError, match="other than the old"), applied(*edits):
        pass
    both = (
        Patch(target, "return rank, column,", "return rank + 100, column,"),
        Patch(target, "+ within", "+ within + 7"),
    )
    before = slots.place(slots.Geometry(4), 5)
    with applied(*both):
        rank, column, offset = slots.place(slots.Geometry(4), 5)
    assert (rank - 100, column, offset - 7) == before


@pytest.mark.parametrize(
    ("target", "old", "new", "named"),
    [
        (POP, "self", "it", "once, not"),
        (POP, "last=Maybe", "last=True", "once, not 0 times"),
        (POP, "return ", "return return ", "Python"),
        ("reference.state.free_queue:FreeQueue.push", "a", "b", "something that exists"),
        ("reference.state.no_such_module:f", "a", "b", "something that exists"),
        ("reference.state.pool:NULL", "0", "1", "a plain function"),
    ],
)
def test_an_ambiguous_or_impossible_patch_is_refused(target, old, new, named):
    original = FreeQueue.pop.__code__
    with pytest.raises(OperationError, match=named), applied(Patch(target, old, new)):
        raise AssertionError("the block must not run")
    assert FreeQueue.pop.__code__ is original
