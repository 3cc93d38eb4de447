"""Hits that end inside a block which the step at hand writes: they wait for what is not there yet."""

from __future__ import annotations

from hkv.spec import FullAttention, Mamba
from tests.reference.build import manager, picture


def _siblings():
    """A cache in which 12 tokens are cached, and 16 more tokens of the same text are being filled in this step."""
    specs = [FullAttention(block_size=16), Mamba(block_size=32)]
    cache = manager(specs, num_blocks=20, hash_block_size=4, scheduler_block_size=32, partial_hits=True)
    cache.step()
    cache.request("a", range(14))
    cache.allocate("a", 12)
    cache.advance("a", 12)
    cache.step()
    cache.copies()
    return cache


def test_a_hit_inside_a_block_of_this_step_waits():
    cache = _siblings()
    cache.request("b", range(24))
    assert cache.allocate("b", 16) is not None
    cache.advance("b", 16)
    before = picture(cache)
    cache.request("c", range(20))
    assert cache.lookup("c").hit == 12
    assert cache.lookup("c").blocks[0] == cache.rows("b")[0]
    assert cache.allocate("c", 8, hit=12) is None
    cache.drop("c")
    assert picture(cache) == before
    cache.step()
    cache.request("c", range(20))
    assert cache.lookup("c").hit == 12
    assert cache.allocate("c", 8, hit=12) is not None


def test_a_hit_on_what_was_written_before_this_step_does_not_wait():
    cache = _siblings()
    cache.request("b", range(24))
    cache.allocate("b", 13)
    cache.advance("b", 13)
    cache.step()
    cache.allocate("b", 3)
    cache.advance("b", 3)
    cache.request("c", range(20))
    assert cache.lookup("c").hit == 12
    assert cache.lookup("c").blocks[0] == cache.rows("b")[0]
    assert cache.allocate("c", 8, hit=12) is not None


def test_a_hit_inside_a_copy_of_this_step_waits():
    cache = _siblings()
    for id in ("b", "c"):
        cache.request(id, range(20))
        assert cache.lookup(id).hit == 12
        assert (cache.allocate(id, 8, hit=12) is None) == (id == "c")
        if id == "b":
            cache.advance("b", 20)
    assert cache.lookup("c").blocks[0] == cache.rows("b")[0][:1]
    assert cache.copies()
