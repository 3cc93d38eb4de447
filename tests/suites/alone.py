"""A request that was admitted with the pool to itself gets to its last token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.engine import apply
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Allocation, Header
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.spec import Mamba, OpaqueState
from tests.reference.build import allocation
from tests.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class Alone:
    """One request over an empty pool; `chunks` are the tokens of each step, as long as there are that many left."""

    header: Header
    length: int
    chunks: tuple[int, ...]

    @property
    def operations(self) -> int:
        """Operations of the case: arrival, and for each chunk, in a step of its own, an allocation and an advance."""
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
    """A request that `must_fit` admits into an empty pool is not refused on its way to its last token, chunk by chunk.

    Copies are made at the end of each step, as a scheduler does: a pending one holds a block. Exception: with Mamba
    groups, a pool of fewer blocks than `blocks_at_once`. Admission counts one state of each, where the next step holds
    two, and with hits inside blocks three: the copy of a tail beside them. vLLM 0.33 turns pools with room for one
    state away before it serves, those with room for two it does not.
    """
    config = to_config(case.header)
    recurrent = any(isinstance(spec, Mamba) for spec in config.topology.specs)
    if recurrent and case.header.num_blocks - 1 < blocks_at_once(config, case.length):
        return
    refused = refused_after(case)
    if refused is not None:
        yield f"admitted, and refused after {refused} of {case.length} tokens"


def refused_after(case: Alone) -> int | None:
    """Tokens after which the request is refused, though it was admitted; None if it gets to its end, or never in."""
    engine = NumpyEngine(case.header)
    apply(engine, oplog.RequestOp(id="alone", tokens=[0] * case.length))
    computed = 0
    for chunk in case.chunks:
        new = min(chunk, case.length - computed)
        if not new:
            break
        apply(engine, oplog.StepOp())
        # The gate is for admission: it counts blocks before any is retired, so a running request would be turned away.
        answer = apply(engine, allocation("alone", new, must_fit=not computed))
        assert isinstance(answer, Allocation)
        if answer.blocks is None:
            return computed or None
        apply(engine, oplog.AdvanceOp(id="alone", tokens=new))
        apply(engine, oplog.CopiesOp())
        computed += new
    return None


def blocks_at_once(config: VllmConfig, length: int) -> int:
    """Blocks that a request of `length` tokens may hold at once.

    A Mamba group holds two states, that of the step before and the new one, and its scratch and checkpoint blocks, as
    vLLM 0.33 reckons before it serves (`MambaSpec.max_memory_usage_bytes`); and, with hits inside blocks, the copy of
    the prompt's tail until the step ends, which it does not reckon with.
    """
    total = 0
    for group, spec in enumerate(config.topology.specs):
        if isinstance(spec, Mamba):
            total += 2 + spec.num_speculative_blocks + spec.num_prefill_checkpoint_blocks + config.partial_hits
        else:
            total += 1 if isinstance(spec, OpaqueState) else -(-length // config.block_size(group))
    return total


SUITE = CaseSuite("alone", "the reference manager with one request in an empty pool", draw_alone, (completion,))
