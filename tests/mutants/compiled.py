"""Defects of the compiled rules: `hkv.dialects.vllm.rules`, behind `hkv.dialects.vllm.machine`."""

from __future__ import annotations

from tests.mutants.row import Planted

RULES = "hkv.dialects.vllm.rules."
TRAFFIC = "tests.cache.test_lockstep:traffic"
UNWRITTEN = "tests.cache.test_unwritten:many_seeds"
FORKS = "tests.cache.test_fork:test_what_was_forked_goes_on"


def _row(
    name: str, function: str, text: str, defect: str, judge: str = TRAFFIC, arguments: tuple[str | int, ...] = ()
) -> Planted:
    return Planted(name, RULES + function, text, defect, judge, arguments)


ROWS = (
    # Forks.
    _row(
        "fork-leaves-out-a-reference",
        "fork:_share",
        "adopt(w, target + first, full - first)",
        "adopt(w, target + first, full - first - 1)",
        FORKS,
    ),
    _row(
        "fork-counts-its-copy-as-registered", "fork:_share", "(Row.CACHED, full)", "(Row.CACHED, full + copied)", FORKS
    ),
    _row("fork-has-a-key-too-few", "fork:_clone", "op.keys)", "op.keys - 1)", FORKS),
    _row(
        "fork-is-granted-what-its-parent-was",
        "fork:_clone",
        "Request.GRANTED: op.computed",
        "Request.GRANTED: op.granted",
        "tests.cache.test_fork:test_a_fork_may_compute_no_more_than_it_was_granted",
    ),
    _row(
        "fork-stays-calm",
        "fork:_clone",
        "Request.CALM: 0",
        "Request.CALM: op.calm",
        "tests.cache.test_fork:test_a_fork_takes_the_blocks_that_its_parent_has_ahead",
    ),
    _row(
        "fork-copies-full-blocks-too",
        "fork:_spans",
        "full * block < computed",
        "full * block <= computed",
        "tests.cache.test_fork:test_a_fork_takes_the_blocks_that_its_parent_has_ahead",
    ),
    _row(
        "fork-misses-a-null-block",
        "fork:_survey",
        "(first > readable)",
        "(first > readable + 1)",
        "tests.cache.test_fork:test_it_is_refused_when_a_block_is_missing",
        (44,),
    ),
    _row(
        "fork-needs-one-block-more-than-there-are",
        "fork:fork",
        "copies > work.free",
        "copies > work.free + 1",
        "tests.cache.test_fork:test_it_is_refused_whole_without_room",
        (10,),
    ),
    # Finding.
    _row("run-goes-on-over-a-gap", "finders:backward", "run + 1, 0)", "run + 1, run)"),
    _row("run-begins-anywhere", "finders:backward", "(phase == 0)), run + 1", "(phase >= 0)), run + 1"),
    _row(
        "margin-not-counted-in-the-phase",
        "finders:backward",
        "jnp.maximum(last + 1 - search.drop, 0)",
        "jnp.maximum(last + 1, 0)",
        TRAFFIC,
        ("eagle",),
    ),
    _row("miss-counts-as-hit", "finders:forward", "end - ~found", "end"),
    _row("no-drop-in-full-attention", "finders:forward", "length -= search.drop & (length > 0)", "pass"),
    _row(
        "no-drop-inside-a-block",
        "finders:inside",
        "units - (search.drop & (units > 0))",
        "units",
        TRAFFIC,
        ("partial",),
    ),
    _row("one-group-for-all", "finders:_known", "query.first + query.members", "query.first + 1"),
    _row(
        "keys-beyond-the-lookahead",
        "hit:hashed_keys",
        "tokens - view.whole(CacheField.LOOKAHEAD)",
        "tokens",
        "tests.cache.test_keyed:test_given_keys_beyond_the_lookahead_are_not_used",
        (3,),
    ),
    _row(
        "no-margin-beyond-the-candidate",
        "hit:longest_hit",
        "jnp.minimum(at.current + margin, keys * hash_block)",
        "at.current",
        TRAFFIC,
        ("eagle",),
    ),
    _row("shared-prefix-of-the-last-group", "hit:longest_hit", "jnp.maximum(at.longest, new)", "new"),
    _row(
        "state-at-the-prompts-end",
        "hit:resumable",
        "jnp.maximum(view.whole(CacheField.LOOKAHEAD), 1)",
        "view.whole(CacheField.LOOKAHEAD)",
        TRAFFIC,
        ("partial", "speculative_state"),
    ),
    # Admission.
    _row("half-a-block-is-skipped", "admit:skipped_blocks", "divide(", "ceil_divide("),
    _row("copy-not-counted", "admit:_count", "estimate + split)", "estimate)", TRAFFIC, ("partial",)),
    _row("queued-blocks-of-a-hit-are-free", "admit:_count", "queued + free", "queued"),
    _row(
        "state-left-behind-is-not-counted",
        "admit:_count",
        "1 + owed + exported +",
        "1 + owed +",
        TRAFFIC,
        ("speculative_state",),
    ),
    _row(
        "no-column-for-a-state-left-behind",
        "admit:spread_row",
        "running - exported",
        "running",
        TRAFFIC,
        ("speculative_state",),
    ),
    _row(
        "scratch-stays",
        "admit:spread_row",
        "jnp.maximum(length - scratch, 0)",
        "length",
        TRAFFIC,
        ("speculative_state",),
    ),
    # Allocation.
    _row("hit-adopts-what-nobody-reads", "allocate:adopt_hit", "jnp.maximum(skip, found))", "found)"),
    _row("hit-is-registered-in-full", "allocate:adopt_hit", "length - split", "length", TRAFFIC, ("partial",)),
    _row("copy-of-itself", "allocate:_copy", "jnp.where(adopted, copy, source)", "source", TRAFFIC, ("partial",)),
    _row(
        "copy-takes-keys-from-a-hit", "allocate:_copy", "left = owed & ~adopted", "left = owed", TRAFFIC, ("partial",)
    ),
    _row(
        "copy-owed-twice",
        "allocate:_copy",
        "set_row(slot, group, Row.PARTIAL, 0)",
        "set_row(slot, group, Row.PARTIAL, column + 1)",
        TRAFFIC,
        ("partial",),
    ),
    _row(
        "scratch-is-lost", "allocate:_move_scratch", "spread.moved", "0 * spread.moved", TRAFFIC, ("speculative_state",)
    ),
    _row(
        "row-of-states-forgets-that-it-grew",
        "allocate:_move_scratch",
        "Row.GROWN, 1",
        "Row.GROWN, 0",
        TRAFFIC,
        ("speculative_state",),
    ),
    _row(
        "drafts-have-states-in-columns",
        "allocate:grow",
        "jnp.where(recurrent, demand.main, demand.slots)",
        "demand.slots",
    ),
    # Registration.
    _row(
        "eagle-registers-no-block-more",
        "register:cacheable_tokens",
        "remainder(certain, alignment) + block",
        "remainder(certain, alignment)",
        TRAFFIC,
        ("eagle",),
    ),
    _row(
        "reprefillable-tokens-are-certain",
        "register:cacheable_tokens",
        "tokens - view.whole(CacheField.REPREFILLABLE)",
        "tokens",
        TRAFFIC,
        ("eagle",),
    ),
    _row("registered-once-more", "register:_group", "Row.CACHED, full", "Row.CACHED, done"),
    _row(
        "tail-registered-where-nobody-resumes",
        "register:_prompt_tail",
        "(end == last) | (end == tail.junction)",
        "(end == last) | (end >= 0)",
        TRAFFIC,
        ("partial",),
    ),
    _row("last-token-is-reusable", "register:_reusable", "jnp.maximum(prompt - 1, 0)", "prompt", TRAFFIC, ("partial",)),
    _row(
        "tail-does-not-owe-a-copy",
        "register:_prompt_tail",
        "Row.PARTIAL, index + 1",
        "Row.PARTIAL, 0",
        TRAFFIC,
        ("partial",),
    ),
    _row(
        "state-left-behind-for-nobody",
        "export:register",
        "wanted = at_end | retained",
        "wanted = retained",
        TRAFFIC,
        ("speculative_state",),
    ),
    _row(
        "state-left-behind-is-found-anyway",
        "export:register",
        "present & ~wanted",
        "present & wanted & ~keyed",
        TRAFFIC,
        ("speculative_state",),
    ),
    _row(
        "retention-leaves-out-the-first",
        "retention:Kept.stretch",
        "entry >= begin",
        "entry > begin",
        TRAFFIC,
        ("retention",),
    ),
    # Waiting for what is written.
    _row("written-to-the-last-token", "unwritten:must_wait", "(written < inside)", "(written <= inside)", UNWRITTEN),
    _row("grant-noted-once", "unwritten:note_grant", "(last != work.steps)", "(last > work.steps)", UNWRITTEN),
    _row(
        "hit-counts-as-written-by-itself",
        "unwritten:note_blocks",
        "jnp.where(joined != 0, 0, ",
        "jnp.where(joined < 0, 0, ",
        UNWRITTEN,
    ),
    # The end.
    _row(
        "retired-blocks-are-given-back-twice",
        "retire:give_back",
        "Row.FIRST, jnp.where(everything, 0, retired)",
        "Row.FIRST, jnp.where(everything, 0, first)",
    ),
    _row("preempted-row-stays-registered", "retire:give_back", "Row.CACHED, 0", "Row.PARTIAL, 0"),
    _row("reset-forgets-why", "evict:reset", "key_table.absent(value)", "0", TRAFFIC),
    _row(
        "copies-given-back-once",
        "copies:made_copies",
        "row + local[0], jnp.int32(1)",
        "row, jnp.int32(1)",
        TRAFFIC,
        ("partial",),
    ),
    _row("calm-over-a-full-block", "calm:_unregistered", "(cached + 1) * block - 1", "(cached + 1) * block"),
    _row(
        "preempted-request-keeps-its-tokens",
        "transitions:leave",
        "Request.COMPUTED, Request.IN_FLIGHT,",
        "Request.IN_FLIGHT,",
    ),
)
"""Judges that compare with the reference under random traffic, or in a case made for the defect."""
