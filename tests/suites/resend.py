"""Resent prompts resume close to their end: the promise that retention makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Allocation, Header, Hit
from hkv.dialects.vllm.traffic.headers import draw_header
from hkv.dialects.vllm.traffic.hit_comparison import Cause, causes
from hkv.spec import SlidingWindow
from tests.reference.build import allocation
from tests.suites.suite import CaseSuite, case_check

FEATURES = ("core", "eagle", "retention", "retention", "partial", "context_parallel", "lookahead_hash")


@dataclasses.dataclass(frozen=True)
class Resend:
    """A prompt that is computed and freed, an `other` one between, and `kept` tokens of the first once more with a
    `suffix`.

    The pool holds both prompts. A step's `chunk` is a multiple of `scheduler_block_size`, and equal to it where there
    are recurrent groups.
    """

    header: Header
    prompt: tuple[int, ...]
    other: tuple[int, ...]
    kept: int
    suffix: int
    chunk: int

    @property
    def operations(self) -> int:
        """Operations of the case: of each text an arrival, two for each chunk and a free; then an arrival, a lookup."""
        chunks = [-(-len(text) // self.chunk) for text in (self.prompt, self.other) if text]
        return sum(2 + 2 * count for count in chunks) + 2

    @property
    def again(self) -> tuple[int, ...]:
        """The prompt that is sent last: from where it leaves the first on, token 9, which the first has not."""
        return self.prompt[: self.kept] + (9,) * self.suffix

    @property
    def unit(self) -> int:
        """Tokens of which every hit is a multiple, whichever group is asked."""
        return self.header.scheduler_block_size

    def promised(self) -> int:
        """Tokens that the last prompt resumes at, at least.

        With every boundary kept: the last one before it leaves the first prompt. With sparse retention: the last
        multiple of the interval before that, or the end of the prompt if it gets there. A draft's drop comes first
        and costs one unit, tokens that a key looks ahead at must be there, and one token is always computed.
        Exceptions, where nothing is promised: hits inside blocks with sparse retention; several draft windows
        (`hkv.dialects.vllm.traffic.hit_comparison`).
        """
        header = self.header
        windows = sum(group["kind"] == "sliding_window" for group in header.groups)
        if (header.eagle and windows > 1) or (header.partial_hits and header.retention_interval is not None):
            return 0
        unit, interval = self.unit, header.retention_interval
        end = self.kept - header.hash_lookahead
        end = min(end, len(self.again) - 1)
        boundary = end // unit * unit
        drop = unit * self._dropped_units(boundary)
        if interval is not None:
            replayed = (len(self.prompt) - 1) // unit * unit - drop
            on_grid = max(0, boundary - drop) // interval * interval if interval else 0
            return max(on_grid, replayed if 0 <= replayed <= boundary - drop else 0)
        return max(0, boundary - drop)

    def _dropped_units(self, boundary: int) -> int:
        """Units that the drop costs: one more where states cannot be peeked at, one more if a short window comes last.

        Another text, or a second group of longer blocks, shortens the candidate before the window drops; and a window
        that reaches back to the first token is rounded down before it drops, wherever its candidate ends.
        """
        if not (self.header.eagle or self.header.eagle_groups):
            return 0
        short = Cause.SHORT_PREFIX_DROP in causes(to_config(self.header), len(self.again))
        recurrent = any(group["kind"] == "mamba" for group in self.header.groups)
        others = {str(group) for group in self.header.groups if group["kind"] != "opaque"}
        whole = self._reads_all(boundary - self.unit)
        return 1 + recurrent + bool(short and (self.suffix or len(others) > 2 or whole))

    def _reads_all(self, hit: int) -> bool:
        """True if a draft's window of blocks shorter than a unit wants every block before a hit of so many tokens."""
        config = to_config(self.header)
        specs = [config.topology.specs[group] for group in config.eagle_group_ids]
        return any(
            hit < -(-(spec.window - 1) // spec.block_size) * spec.block_size
            for spec in specs
            if isinstance(spec, SlidingWindow) and spec.block_size < self.unit
        )

    def __str__(self) -> str:
        groups = "; ".join(" ".join(f"{k}={v}" for k, v in group.items()) for group in self.header.groups)
        return (
            f"[{groups}] eagle {self.header.eagle} {self.header.eagle_groups}, retention "
            f"{self.header.retention_interval}: {len(self.prompt)} tokens, {len(self.other)} of others, then the first "
            f"{self.kept} and {self.suffix} new ones"
        )


def draw_resend(choices: Choices) -> Resend:
    """A random case."""
    header = draw_header(choices, choices.pick(FEATURES), version=2)
    groups = [_cached(group) for group in header.groups]
    header = msgspec.structs.replace(
        header, groups=groups, num_blocks=400, prefill_lookahead=0, caching=True, watermark=0.0, bugs=[]
    )
    unit = header.scheduler_block_size
    most = max(1, min(4 * unit, header.max_model_len - 2))
    length = max(1, min(most, unit * choices.integer(1, 4) + choices.integer(-1, 1)))
    if choices.chance(30):
        length = choices.integer(1, most)
    kept = length if choices.chance(70) else choices.integer(0, length)
    suffix = choices.pick((0, 1, unit, unit + 1)) if kept else 1
    suffix = min(suffix, header.max_model_len - kept)
    # A step leaves one state behind, that of its end.
    recurrent = any(group["kind"] == "mamba" for group in header.groups)
    chunk = unit * (1 if recurrent else choices.pick((4, 1, 1, 2)))
    between = choices.integer(0, most)
    prompt = tuple(choices.integer(0, 4) for _ in range(length))
    other = tuple(5 + choices.integer(0, 3) for _ in range(between))
    return Resend(header, prompt, other, kept, suffix, chunk)


def _cached(group: dict[str, Any]) -> dict[str, Any]:
    """A group of the same kind that can be cached; a window of one token reads nothing and is made longer."""
    changes = {"cache_mode": "align"} if "cache_mode" in group else {}
    return group | changes | ({"window": 2} if group.get("window") == 1 else {})


@case_check("retention promise", "B-I13")
def retention(case: Resend) -> Iterator[str]:
    """A prompt that was computed and not evicted is resumed at the last boundary that was worth keeping, or beyond."""
    engine = NumpyEngine(case.header)
    for id, tokens in (("first", case.prompt), ("other", case.other)):
        if tokens and not _serve(engine, id, tokens, case):
            return
    apply(engine, oplog.RequestOp(id="again", tokens=list(case.again)))
    found = engine.lookup("again")
    assert isinstance(found, Hit)
    if found.hit < case.promised():
        yield f"{found.hit} tokens are found of {case.kept} that were computed, {case.promised()} were promised"


def _serve(engine: NumpyEngine, id: str, tokens: tuple[int, ...], case: Resend) -> bool:
    """Computes a prompt chunk by chunk and frees it; False when the pool is too small for it."""
    apply(engine, oplog.RequestOp(id=id, tokens=list(tokens)))
    computed = 0
    while computed < len(tokens):
        new = min(case.chunk, len(tokens) - computed)
        answer = apply(engine, allocation(id, new))
        assert isinstance(answer, Allocation)
        if answer.blocks is None:
            return False
        apply(engine, oplog.AdvanceOp(id=id, tokens=new))
        apply(engine, oplog.CopiesOp())
        apply(engine, oplog.StepOp())
        computed += new
    apply(engine, oplog.FreeOp(id=id))
    return True


SUITE = CaseSuite(
    "resend", "the reference manager when a prompt is sent again after another one", draw_resend, (retention,)
)
