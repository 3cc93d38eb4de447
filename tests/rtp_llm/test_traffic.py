"""Random traffic asks of a cache what RTP-LLM's own callers ask, in every feature."""

from __future__ import annotations

import itertools

import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES, SINGLE
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import RtpHeader
from hkv.dialects.rtp_llm.shrink_rules import RTP_SHRINK_RULES
from hkv.dialects.rtp_llm.traffic import draw_rtp_header, drive_rtp, rtp_features

Pairs = list[tuple[structs.RtpOp, structs.RtpAnswer]]


def drawn(dialect: str, feature: str, seed: int) -> tuple[RtpHeader, Pairs]:
    choices = RandomChoices(seed)
    header = draw_rtp_header(choices, feature, dialect)
    engine, pairs = RtpNumpyEngine(header), []

    def perform(operation: structs.RtpOp) -> structs.RtpAnswer:
        pairs.append((operation, engine.perform(operation)))
        return pairs[-1][1]

    drive_rtp(header, choices, perform, 25)
    return header, pairs


@pytest.mark.parametrize("dialect", NAMES)
def test_streams_ask_for_the_devices_cache_with_reuse_alone(dialect: str) -> None:
    """Both are a stream's for good; a decode server begins with neither, and only growth counts other tokens."""
    seen = dict.fromkeys(("cold", "warm", "longer", "shorter"), 0)
    for feature, seed in itertools.product(rtp_features(dialect), range(6)):
        header, pairs = drawn(dialect, feature, seed)
        running, asked, tokens = set[str](), dict[str, set[tuple[bool, bool]]](), dict[str, int]()
        for operation, answer in pairs:
            match operation:
                case structs.RequestOp():
                    tokens[operation.id] = len(operation.tokens)
                case structs.AppendOp():
                    tokens[operation.id] += len(operation.tokens[0])
                case structs.FreeOp():
                    running.discard(operation.id)
                case structs.MallocOp():
                    flags = (operation.reuse, operation.device_cache)
                    assert flags != (False, True)
                    if operation.id not in running:
                        assert operation.length is None
                    elif operation.length is not None:
                        seen["longer" if operation.length > tokens[operation.id] else "shorter"] += 1
                    if operation.id not in running and header.prefill_cp_size > 1:
                        assert flags == (False, False)
                        seen["cold"] += 1
                    else:
                        asked.setdefault(operation.id, set()).add(flags)
                        seen["warm"] += flags == (True, True)
                    if isinstance(answer, structs.Malloc) and answer.verdict == "granted":
                        running.add(operation.id)
        assert all(len(flags) == 1 for flags in asked.values())
    assert min(count for name, count in seen.items() if name != "cold" or dialect != SINGLE) > 10


@pytest.mark.parametrize("dialect", NAMES)
def test_features_share_what_is_nobodys_own(dialect: str) -> None:
    """Several sequences, kernel blocks and groups that evict in no way of their own are met in every feature."""
    for feature in rtp_features(dialect):
        logs = [drawn(dialect, feature, seed) for seed in range(24)]
        groups = [group for header, _ in logs for group in header.groups]
        assert {group.evict_policy for group in groups} == {"CHAIN", "INDEPENDENT", "NONE"}
        assert any(0 < group.kernel_block_size < group.block_size for group in groups)
        arrivals = [op for _, pairs in logs for op, _ in pairs if isinstance(op, structs.RequestOp)]
        assert {op.sequences for op in arrivals} == {1, 2, 3}


def test_no_smaller_case_asks_for_the_devices_cache_alone() -> None:
    """A case stays one that RTP-LLM's streams make: where the device's cache comes back, so does reuse."""
    operation = structs.MallocOp(id="a", reuse=False, device_cache=False, length=7)
    simpler = list(RTP_SHRINK_RULES.operations(operation))
    assert structs.MallocOp(id="a", length=7) in simpler
    assert structs.MallocOp(id="a", reuse=False, device_cache=False) in simpler
    assert all(each.reuse or not each.device_cache for each in simpler)
