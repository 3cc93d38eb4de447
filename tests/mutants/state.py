"""Defects of the mechanisms: `hkv/state`."""

from __future__ import annotations

from tests.mutants.row import Planted

POOL = "tests.state.test_pool:"
POOLED = "tests.state.test_pooled:"
ROWS_OF_BLOCKS = "tests.state.test_rows:test_twin_and_jitted_rows_agree_and_stay_in_step"
BOTH = "many_lives"
TRAFFIC = "tests.cache.test_lockstep:traffic"


def _pool(name: str, function: str, text: str, defect: str, judge: str = BOTH) -> Planted:
    return Planted(name, f"hkv.state.{function}", text, defect, POOL + judge)


def _pooled(name: str, function: str, text: str, defect: str, judge: str) -> Planted:
    return Planted(name, f"hkv.state.{function}", text, defect, POOLED + judge)


def _rows(name: str, function: str, text: str, defect: str) -> Planted:
    return Planted(name, f"hkv.state.rows:{function}", text, defect, ROWS_OF_BLOCKS)


SMALLEST = "test_the_smallest_ids_come_first"
BY_ROLE = "test_references_are_counted_by_role"
IN_ORDER = "test_items_are_kept_in_order_of_use"
ONE_KEY = "test_blocks_with_one_key_keep_their_order"
PARTS = "test_parts_of_a_block"

ROWS = (
    # The key table.
    _pool("ring-forgets-its-last", "key_table:insert", "w.link(last, part, 0)", "w.link(first, part, 0)", ONE_KEY),
    _pool("first-of-a-key-is-the-last", "key_table:insert", "first * 8 + 1, block * 8", "block * 8 + 1, block * 8"),
    Planted("sharing-is-not-said", "hkv.state.key_table:insert", "word | SHARED", "word", TRAFFIC),
    _pool(
        "second-block-hides-the-first",
        "key_table:remove",
        "first_block(value) == block, after",
        "first_block(value) == block, before",
    ),
    _pool("ring-of-one-is-shared", "key_table:remove", "(after != before)", "(after == before)", ONE_KEY),
    _pool("reason-is-lost", "key_table:absent", "& 3)", "& 1)"),
    _pool("reason-of-a-cached-key-is-kept", "key_table:note_absence", "(value & ~6)", "value"),
    _pool("reason-hides-a-block", "key_table:note_absence", "jnp.where(cached, later, reason)", "reason"),
    _pool(
        "keys-inside-a-block-stay", "key_table:drop_keys", "parts = 1 + work.sizes.buckets.parts", "parts = 1", PARTS
    ),
    _pool("keys-stay-with-their-source", "key_table:move_keys", 'w.write("keys", 0, w.key(source, part))', "w", PARTS),
    _pool("key-inside-a-block-is-not-said", "key_table:add_key", "word | PARTS)", "word)"),
    Planted(
        "state-inside-a-block-is-registered-again",
        "hkv.state.key_table:primary_entry",
        "value - 1)",
        "value - 0)",
        "tests.cache.test_again:test_a_state_left_behind_inside_a_block_is_registered_once",
    ),
    Planted(
        "shortest-key-counts",
        "hkv.state.key_table:highest_part",
        "parts - 1, 0)",
        "1, 0)",
        TRAFFIC,
        ("partial",),
    ),
    # The free queue.
    _pool("appended-in-row-order", "free_queue:release", "w.tail + (left - 1)", "w.tail + (count - left)"),
    _pool(
        "known-blocks-go-to-the-head",
        "free_queue:release",
        "last & known, last & ~known",
        "last & ~known, last & known",
    ),
    _pool("shared-block-is-free", "free_queue:release", "references == -1", "references <= -1"),
    _pool("tail-stays", "free_queue:release", "tail=work.tail + most", "tail=work.tail"),
    _pool("second-block-evicted-uncounted", "free_queue:take", "evictions + stopped", "evictions"),
    _pool(
        "eviction-counted-by-block", "free_queue:take", "evictions=w.evictions + named", "evictions=w.evictions + given"
    ),
    Planted(
        "evicted-key-was-never-seen",
        "hkv.state.free_queue:take",
        '"table", EVICTED,',
        '"table", 0,',
        TRAFFIC,
        ("core",),
    ),
    _pool(
        "adopted-block-stays-queued",
        "free_queue:adopt",
        "jnp.where(queued, w.place(place - 1), w.queue.shape[0] - 1)",
        "w.queue.shape[0] - 1",
    ),
    _pool("adopted-block-has-one-reference", "free_queue:adopt", "place - 1, 0)),", "-1, 0)),"),
    _pool(
        "squeezed-block-forgets-its-place",
        "free_queue:squeeze",
        "(target & w.mask) + 1",
        "(source & w.mask) + 1",
        "test_the_ring_is_squeezed_when_it_is_full",
    ),
    _pool(
        "ring-is-never-squeezed",
        "free_queue:make_room",
        "> buckets.queue",
        "> 1000 * buckets.queue",
        "test_the_ring_is_squeezed_when_it_is_full",
    ),
    # Ids, references by role, items in order of use.
    _pooled("upper-level-says-empty-early", "id_bitmap:take", "emptied & (rest == 0)", "emptied", SMALLEST),
    _pooled(
        "upper-level-is-not-told",
        "id_bitmap:put",
        "for level, word in enumerate(words):",
        "for level, word in enumerate(words[:1]):",
        SMALLEST,
    ),
    _pooled("highest-bit-first", "id_bitmap:lowest", "(word & -word) - 1", "(word & -word) * 0 + 31", SMALLEST),
    _pooled(
        "connector-does-not-hold",
        "role_counts:let_go",
        "left[Role.REQUEST] + left[Role.CONNECTOR]",
        "left[Role.REQUEST]",
        BY_ROLE,
    ),
    _pooled("cached-block-is-free", "role_counts:let_go", "(users + left[Role.CACHE] == 0)", "(users == 0)", BY_ROLE),
    _pooled(
        "second-holder-counts",
        "role_counts:reference",
        "(request + connector == 0)",
        "(request + connector >= 0)",
        BY_ROLE,
    ),
    _pooled("claim-keeps-the-count", "role_counts:claim_found", "free - 1", "free", BY_ROLE),
    _pooled(
        "use-of-the-last-breaks-the-ring",
        "recency:use",
        "known & (last == key), before, last",
        "known & (last == key), last, last",
        IN_ORDER,
    ),
    _pooled(
        "unlinked-one-way",
        "recency:unlink",
        "work.item(after, Item.PREVIOUS)",
        "work.item(before, Item.PREVIOUS)",
        IN_ORDER,
    ),
    _pooled("block-replaces-a-block", "item_table:fill", "(old == 0)", "(old >= 0)", IN_ORDER),
    _pooled(
        "kept-blocks-are-released", "item_table:remove", "(block != 0) & ~jnp.asarray(keep)", "(block != 0)", IN_ORDER
    ),
    # Rows of blocks.
    _rows(
        "kernel-blocks-of-a-null",
        "_write",
        "jnp.where(value < 0, value, value * rows.ratio + j)",
        "value * rows.ratio + j",
    ),
    _rows("pop-leaves-the-block", "pop", "blank=True", "blank=False"),
    _rows("shorter-row-keeps-its-end", "resize", "_blank(rows, row, length, old, ok)", "rows"),
    _rows("row-moved-onto-itself-is-cleared", "move", "& (source != target)", ""),
    _rows(
        "block-beyond-an-int32",
        "_is_value",
        "(INT32_MAX - (rows.ratio - 1)) // rows.ratio",
        "INT32_MAX // rows.ratio + 1",
    ),
    Planted(
        "swap-leaves-both-where-they-are",
        "hkv.state.rows:swap",
        "positions[::-1]",
        "positions",
        "tests.state.test_rows:test_swap_exchanges_two_slots_and_their_kernel_blocks",
    ),
)
"""Most judges compile the mechanism alone, which takes two seconds."""
