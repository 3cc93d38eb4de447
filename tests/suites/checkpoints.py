"""Checkpoints inside a prefill chunk: where they may stand, by trying every length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hkv.contract.traffic import Choices
from reference.dialects.vllm.kinds.checkpoints import checkpoint_position, checkpoint_possible
from tests.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A chunk and what is asked about it. All counts are tokens; `start` and `block_size` are multiples of
    `granularity`.

    A draft may `drop` the last unit of a hit; kernels export states `alignment` tokens apart.
    """

    tokens: int
    granularity: int
    drop: bool
    lookahead: int
    start: int
    block_size: int
    alignment: int


def draw_checkpoint(choices: Choices) -> Checkpoint:
    """A random case."""
    granularity = choices.integer(1, 8)
    tokens = choices.integer(1, 64)
    return Checkpoint(
        tokens,
        granularity,
        choices.chance(40),
        choices.integer(0, 3),
        choices.integer(0, tokens // granularity) * granularity,
        granularity * choices.integer(1, 4),
        choices.integer(1, 6),
    )


@case_check("tail checkpoint", "B-I13", "B-I15")
def tail_checkpoint(case: Checkpoint) -> Iterator[str]:
    """The checkpoint stands at the longest length at which the same prompt, sent again, could resume.

    One token is always computed, tokens that a key looks ahead at are there, and under the drop the unit after it has a
    key as well.
    """
    unit, keyed = case.granularity, case.tokens // case.granularity * case.granularity
    possible = [
        length
        for length in range(0, case.tokens, unit)
        if (length + unit <= keyed if case.drop else length + case.lookahead <= case.tokens)
    ]
    found = checkpoint_position(case.tokens, unit, case.drop, case.lookahead)
    if found != max(possible, default=0):
        yield f"{case.tokens} tokens are kept at {found}, a repeat can resume at {max(possible, default=0)}"


@case_check("checkpoint reach", "B-I15", "B-I16")
def reach(case: Checkpoint) -> Iterator[str]:
    """A checkpoint lies inside its chunk, a whole number of kernel steps from its start, with a column to spare."""
    for position in range(0, case.tokens + 2):
        if not checkpoint_possible(
            case.start, case.tokens, position, case.granularity, case.block_size, case.alignment
        ):
            continue
        if not case.start + case.granularity <= position < case.tokens:
            yield f"a state at {position} is planned for the chunk from {case.start} to {case.tokens}"
        if (position - case.start) % case.alignment:
            yield f"a state {position - case.start} tokens into a chunk, where the kernel stops every {case.alignment}"
        columns = range((case.start - 1) // case.block_size + 1, -(-case.tokens // case.block_size))
        if len(columns) < 2:
            yield f"a chunk that fills the columns {list(columns)} has none to spare for a state at {position}"


SUITE = CaseSuite("checkpoints", "checkpoints inside a prefill chunk", draw_checkpoint, (tail_checkpoint, reach))
