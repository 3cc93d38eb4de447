"""Chunks of a prefill, which end on the grid of the states that are kept, and checkpoints inside them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.schedule.schedule import Chunking
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from reference.dialects.vllm.kinds.checkpoints import checkpoint_position, checkpoint_possible
from tests.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A prompt that is cut into chunks from `start` on, where a hit ended."""

    config: VllmConfig
    step_tokens: int
    tokens: int
    start: int

    def chunks(self) -> list[tuple[int, int]]:
        """The chunks, in order; stops where one is empty."""
        chunking = Chunking.of(self.config, self.step_tokens)
        start, made = self.start, []
        while start < self.tokens:
            size = chunking.tokens(self.tokens, self.tokens, 0, start, self.step_tokens)
            if size < 1:
                break
            made.append((start, start + size))
            start += size
        return made

    def __str__(self) -> str:
        sizes = [f"{spec.kind}:{spec.block_size}" for spec in self.config.topology.specs]
        return f"{sizes}, {self.step_tokens} tokens a step: {self.tokens} tokens from {self.start} on"


def draw_prefill(choices: Choices) -> Prefill:
    """A random case."""
    config = to_config(draw_header(choices, choices.pick(FEATURES), version=2))
    tokens = choices.integer(1, 60)
    unit = config.hash_block_size if config.partial_hits else config.scheduler_block_size
    start = unit * choices.integer(0, (tokens - 1) // unit)
    return Prefill(config, choices.integer(1, 40), tokens, start)


def recurrent_blocks(case: Prefill) -> list[int]:
    """Tokens between two states of each recurrent group that keeps them."""
    return [spec.block_size for spec in case.config.topology.specs if spec.snapshot] if case.config.caching else []


@case_check("grid stops", "B-I15")
def grid_stops(case: Prefill) -> Iterator[str]:
    """No chunk of a prefill starts inside a recurrent block and runs past its end, where a state has to be kept.

    Nor does a chunk that is not the last end off every grid. Exception: steps too short for a common block.
    """
    blocks = recurrent_blocks(case)
    if blocks and math.lcm(*blocks) > case.step_tokens:
        return
    for start, end in case.chunks():
        for size in {math.lcm(*blocks)} if blocks else ():
            if start % size and end > -(-start // size) * size and end <= case.tokens - 1:
                yield f"the chunk from {start} to {end} runs past {-(-start // size) * size}, a state's place"
        grids = [*blocks, case.config.hash_block_size] if case.config.partial_hits else blocks
        if blocks and end < case.tokens and all(end % size for size in grids):
            yield f"the chunk from {start} to {end} ends off the grids {grids}"


@case_check("progress", "B-I24")
def progress(case: Prefill) -> Iterator[str]:
    """Chunks follow one another without gap, none is longer than a step, and a long enough step reaches the end."""
    position = case.start
    for start, end in case.chunks():
        if start != position or not 0 < end - start <= case.step_tokens:
            yield f"the chunk from {start} to {end} follows {position}, {case.step_tokens} tokens a step"
        position = end
    if position != case.tokens and case.step_tokens >= case.config.scheduler_block_size:
        yield f"stuck at {position} of {case.tokens} tokens"


SUITE = CaseSuite("chunking", "the schedule's chunks of a prefill", draw_prefill, (grid_stops, progress))


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


CHECKPOINTS = CaseSuite("checkpoints", "checkpoints inside a prefill chunk", draw_checkpoint, (tail_checkpoint, reach))
