"""A request that was admitted with the pool to itself gets to its last token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from hkv.oracle import oplog
from hkv.oracle.configuration import to_config
from hkv.oracle.engine import apply
from hkv.oracle.engines.numpy import NumpyEngine
from hkv.oracle.oplog import Allocation, Header
from hkv.spec import Mamba
from hkv.testing.choices import Choices
from hkv.testing.headers import FEATURES, draw_header
from hkv.testing.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class Alone:
    """One request over an empty pool.

    Attributes:
      header: the configuration.
      length: tokens of the request.
      chunks: tokens of each step, as long as there are that many left.
    """

    header: Header
    length: int
    chunks: tuple[int, ...]

    @property
    def operations(self) -> int:
        """Operations of the case: arrival, and two for each chunk."""
        left, count = self.length, 1
        for chunk in self.chunks:
            if left > 0:
                count, left = count + 2, left - chunk
        return count

    def __str__(self) -> str:
        groups = "; ".join(" ".join(f"{k}={v}" for k, v in group.items()) for group in self.header.groups)
        return f"[{groups}], {self.header.num_blocks} blocks: {self.length} tokens in chunks of {self.chunks[:4]}..."


def draw_alone(choices: Choices) -> Alone:
    """A random case."""
    feature = choices.pick(("core", "core", "core", *(feature for feature in FEATURES if feature != "external")))
    header = msgspec.structs.replace(draw_header(choices, feature, version=2), num_blocks=choices.integer(3, 40))
    length = choices.integer(1, min(64, header.max_model_len))
    limit = header.max_in_flight_tokens or header.max_model_len
    unit = header.scheduler_block_size
    chunks = tuple(max(1, min((3 - choices.integer(0, 2)) * unit, limit)) for _ in range(length))
    return Alone(header, length, chunks)


@case_check("completion", "B-I24")
def completion(case: Alone) -> Iterator[str]:
    """What `must_fit` admits into an empty pool is never refused on its way to its last token, chunk by chunk.

    Exception: Mamba groups, of which admission counts one state where the next step holds two; a pool without a block
    to spare is turned away at start-up instead.
    """
    specs = to_config(case.header).topology.specs
    if any(isinstance(spec, Mamba) for spec in specs) or case.header.num_blocks <= len(specs):
        return
    engine = NumpyEngine(case.header)
    apply(engine, oplog.RequestOp(id="alone", tokens=[0] * case.length))
    computed = 0
    plain = {"lookahead": 0, "external": 0, "delay": False, "reserved": 0, "in_flight": 0}
    for chunk in case.chunks:
        new = min(chunk, case.length - computed)
        if not new:
            return
        answer = apply(engine, oplog.AllocateOp(id="alone", new=new, hit=0, must_fit=not computed, **plain))
        assert isinstance(answer, Allocation)
        if answer.blocks is None:
            if computed:
                yield f"admitted, and refused after {computed} of {case.length} tokens"
            return
        apply(engine, oplog.AdvanceOp(id="alone", tokens=new))
        computed += new


SUITE = CaseSuite("alone", "the reference manager with one request in an empty pool", draw_alone, (completion,))
