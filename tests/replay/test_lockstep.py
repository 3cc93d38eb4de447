"""Two engines side by side: agreement passes through, the first difference is named."""

import pytest

from hkv.dialects.vllm.schedule.run import LockstepEngine, VllmReplayedCache, cache_config
from hkv.oracle.engines import engine_factory
from hkv.replay.agreement import Difference
from hkv.replay.schedule import Schedule
from hkv.spec import spec_from_text
from tests.reference.build import allocation


def engines():
    specs = [spec_from_text("full:4"), spec_from_text("swa:4:8")]
    cache = VllmReplayedCache(cache_config(specs, 20, Schedule(step_tokens=64, max_model_len=256)))
    return [cache.engine("numpy", engine_factory("numpy")) for _ in range(2)]


class Altered:
    """An engine that changes one kind of answer."""

    def __init__(self, engine, method, change):
        self._engine, self._method, self._change = engine, method, change

    def __getattr__(self, name):
        made = getattr(self._engine, name)
        if name != self._method:
            return made
        return lambda *arguments: self._change(made(*arguments))


def serve(engine):
    engine.step()
    engine.request_keyed("0", 9, [1, 2, 3])
    engine.lookup("0")
    engine.allocate(allocation("0", 9, must_fit=True))
    engine.num_free()
    engine.advance("0", 9)
    engine.free("0")
    engine.drop("0")
    return engine.state()


def test_equal_engines_pass_and_the_first_ones_attributes_show():
    first, second = engines()
    both = LockstepEngine(first, second, ("one", "two"))
    assert serve(both) == second.state()
    assert both.evictions == first.evictions
    assert both.copies() == []
    assert both.reset() is True


def shorter(hit):
    hit.hit -= 4
    return hit


def other_block(allocation):
    allocation.blocks[1][0] += 1
    return allocation


def refused(allocation):
    allocation.blocks = None
    return allocation


@pytest.mark.parametrize(
    ("method", "change", "number", "field"),
    [
        ("lookup", shorter, 3, "hit"),
        ("allocate", other_block, 4, "blocks"),
        ("allocate", refused, 4, "refused"),
        ("num_free", lambda free: free + 1, 5, "free blocks"),
    ],
)
def test_the_first_difference_is_named(method, change, number, field):
    first, second = engines()
    both = LockstepEngine(Altered(first, method, change), second, ("one", "two"))
    with pytest.raises(Difference, match=f"operation {number}, {method}.*{field} differs: one: .*; two: ") as caught:
        serve(both)
    assert (caught.value.number, caught.value.operation, caught.value.field) == (number, method, field)
    assert caught.value.answers["one"] != caught.value.answers["two"]
