"""Defects of whole steps: `hkv/step*.py`, and of their reference."""

from __future__ import annotations

from tests.mutants.row import Planted

STEP = "tests.step.test_step:"
ARRIVALS = "tests.step.test_arrivals:"
IN_ORDER = "test_steps_are_the_sequential_operations_in_order"
SHARED = "test_blocks_that_rows_share_are_given_back_by_the_last"
LOOKUPS = "test_arrivals_are_lookups_and_adoptions_in_order"
CONVERSION = "tests.step.test_conversion:test_steps_after_arrivals_and_operations_after_steps"


def _step(name: str, function: str, text: str, defect: str, judge: str = IN_ORDER) -> Planted:
    return Planted(name, f"hkv.cache.step:{function}", text, defect, STEP + judge)


def _arrival(name: str, function: str, text: str, defect: str, judge: str = LOOKUPS) -> Planted:
    return Planted(name, f"hkv.cache.arrivals:{function}", text, defect, ARRIVALS + judge)


ROWS = (
    _step(
        "find-answers-the-lowest-id",
        "find",
        "jnp.where(same, age, 0)",
        "jnp.where(same, 1, 0)",
        "test_of_two_blocks_under_a_key_the_one_registered_first_is_found_though_its_id_is_higher",
    ),
    Planted(
        "find-in-any-group",
        "hkv.cache.step:find",
        "(state.keys[:, 4] == group.astype(jnp.uint32)) &",
        "(state.keys[:, 4] >= 0) &",
        ARRIVALS + "test_every_key_is_found_among_others_that_begin_alike",
    ),
    Planted(
        "reference-refuses-drafts-beyond-the-model",
        "reference.step:Rows._check",
        "min(main + lookahead, self.config.max_model_len)",
        "main + lookahead",
        STEP + "test_drafts_beyond_the_longest_request_need_no_blocks",
        ("full:2",),
    ),
    Planted(
        "drafts-beyond-the-model-are-refused",
        "hkv.cache.step:_check",
        "jnp.minimum(main + batch.lookahead, longest)",
        "main + batch.lookahead",
        STEP + "test_drafts_beyond_the_longest_request_need_no_blocks",
        ("full:2",),
    ),
    _step("half-a-block-is-given-back", "_skipped", "skipped // _blocks(groups)", "-(-skipped // _blocks(groups))"),
    _step(
        "tokens-in-flight-do-not-read",
        "step",
        "jnp.minimum(rows.computed, longest) - batch.in_flight",
        "jnp.minimum(rows.computed, longest)",
    ),
    _step("blocks-given-back-from-the-first", "_give_back", "counts[line, group] - 1 - spans.within", "spans.within"),
    _step("shared-block-goes-with-the-first", "_give_back", "held & (left < 2) &", "held &", SHARED),
    _step(
        "registered-block-goes-to-the-head", "_give_back", "known = gone & (left == 1)", "known = gone & (left == 7)"
    ),
    _step("later-span-behind-an-earlier-one", "_give_back", "head - fronts[-1] + later +", "head - fronts[-1] +"),
    _step(
        "watermark-holds-for-nobody",
        "_exceeds",
        "jnp.where(kept, queue.watermark, 0)",
        "0",
        "test_the_watermark_holds_for_rows_that_begin_while_others_run",
    ),
    _step(
        "refusal-takes-all-later-rows",
        "_serve",
        "((index >= place) & beyond)",
        "(index >= place)",
        "test_rows_are_served_in_order_and_a_small_one_after_a_large_one",
    ),
    _step("handed-out-blocks-keep-their-keys", "_take", ".set(2, mode=", ".add(2, mode="),
    _step(
        "evictions-are-not-counted",
        "_take",
        ".at[StepCounter.EVICTIONS].add(evicted)",
        ".at[StepCounter.EVICTIONS].add(0)",
    ),
    _step("scheduler-blocks-do-not-count", "_cacheable", "tokens - tokens % alignment", "tokens"),
    _step(
        "step-registers-no-block-more-for-eagle",
        "_cacheable",
        "certain - certain % alignment + _blocks(groups)",
        "certain - certain % alignment",
    ),
    _step("key-of-the-blocks-first-tokens", "_register", "(column + 1) * scale - 1", "column * scale"),
    _step("stamp-of-the-next", "_register", "+ order - 1).astype", "- order).astype", SHARED),
    _step(
        "finished-row-gives-back-from-the-start",
        "finish",
        "end = jnp.where(done[:, None], fields.length, fields.first)",
        "end = jnp.where(done[:, None], fields.length - 1, fields.first)",
    ),
    _step("recurrent-row-takes-a-block-a-column", "step", "jnp.minimum(grown - rows.length, 1)", "grown - rows.length"),
    Planted(
        "slots-of-the-next-block",
        "hkv.cache.step_slots:slots_of",
        "column = position // size",
        "column = (position + 1) // size",
        STEP + IN_ORDER,
    ),
    Planted(
        "slots-dealt-to-all-ranks",
        "hkv.cache.step_slots:on_rank",
        "deal % ranks == rank",
        "deal % ranks >= 0",
        STEP + "test_ranks_share_the_tokens_of_a_group_as_slot_mappings_say",
        (1,),
    ),
    Planted(
        "digest-of-the-block-before",
        "hkv.cache.token_hashing:hash_tokens",
        "jnp.where((place == 0)[:, None], size.astype(jnp.uint32), digest)",
        "digest",
        STEP + IN_ORDER,
    ),
    Planted(
        "tokens-of-the-four-before",
        "hkv.cache.token_hashing:hash_tokens",
        "jnp.where((place % 4 == 0)[:, None], 0, words)",
        "words",
        STEP + "test_rows_hash_their_tokens_a_few_at_a_time_as_whole_prompts_are_hashed",
        (6,),
    ),
    _arrival("hit-of-the-whole-prompt", "_look_up", "(lengths < counts[:, None])", "(lengths <= counts[:, None])"),
    _arrival("hit-of-any-group", "_look_up", "jnp.all(readable, axis=1) & below", "jnp.any(readable, axis=1) & below"),
    _arrival("hit-off-the-grid", "_look_up", "% jnp.maximum(parameters.cache[CacheField.ALIGNMENT], 1) == 0", ">= 0"),
    _arrival(
        "eagle-proves-nothing",
        "_spans",
        "(groups[:, GroupField.EAGLE, None] != 0) &",
        "(groups[:, GroupField.EAGLE, None] < 0) &",
    ),
    _arrival(
        "first-by-the-highest-id",
        "_first_blocks",
        'counts = age == oldest.at[place, group].get(mode="fill", fill_value=0)',
        "counts = age >= 0",
        "test_every_key_is_found_among_others_that_begin_alike",
    ),
    _arrival(
        "keys-alike-in-their-first-word",
        "_find",
        "jnp.all(index.words[jnp.minimum(at, missing - 1)] == keys, axis=1)",
        "(index.words[jnp.minimum(at, missing - 1)] == keys)[:, 0]",
        "test_every_key_is_found_among_others_that_begin_alike",
    ),
    _arrival(
        "free-block-is-adopted-where-it-lies",
        "_hold",
        "jnp.any((named > 0) & (state.refs[named] < 2))",
        "jnp.any(named < 0)",
    ),
    _arrival("hashing-goes-on-from-the-root", "arrive", "jnp.where((hashed > 0)[:, None], last, roots)", "roots"),
    Planted(
        "conversion-forgets-the-order-of-a-ring",
        "hkv.cache.conversion:_register",
        'np.argsort(-age, kind="stable")',
        'np.argsort(age, kind="stable")',
        CONVERSION,
    ),
    Planted(
        "conversion-forgets-references",
        "hkv.cache.conversion:to_operations",
        '-(source["refs"][: config.num_blocks] // 2)',
        '-(source["refs"][: config.num_blocks] > 1).astype(int)',
        CONVERSION,
    ),
)
"""A program of whole steps takes a few seconds to compile."""
