"""Streaming sessions, whose last sampled token is taken away when they go on, in both engines."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import ExtraKeys
from hkv.errors import OperationError
from hkv.testing.planting import Patch, applied
from tests.oracle.test_live_logs import allocate, header, perform

BOTH = pytest.mark.parametrize("make", [NumpyEngine, JaxEngine])


def resume(keep: int, *tokens: int, **fields: Any) -> oplog.ResumeOp:
    return oplog.ResumeOp(id="a", keep=keep, tokens=list(tokens), prompt=keep + len(tokens), **fields)


def session(make: Any, *more: Any, **changes: Any) -> Any:
    """An engine in which a request of five tokens sampled a sixth, and then did more."""
    engine = make(header(**changes))
    perform(engine, oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5]), allocate("a", 5))
    perform(engine, oplog.ComputedOp(id="a", tokens=5), oplog.AppendOp(id="a", tokens=[6]), *more)
    return engine


def keys_of(make: Any, tokens: list[int], **changes: Any) -> set[str]:
    """Keys of what a request of these tokens registers."""
    engine = make(header(**changes))
    perform(engine, oplog.RequestOp(id="a", tokens=tokens), allocate("a", len(tokens)))
    return {key for _, _, key in engine.state().cached.values()}


@BOTH
def test_blocks_get_the_keys_of_the_tokens_that_follow(make: Any) -> None:
    engine = session(make, resume(5, 7, 8, 9), allocate("a", 3))
    assert engine.state().rows == {"a": [[1, 2, 3, 4]]}
    assert {key for _, _, key in engine.state().cached.values()} == keys_of(make, [1, 2, 3, 4, 5, 7, 8, 9])


@BOTH
def test_keys_are_given_from_the_block_that_is_cut(make: Any) -> None:
    engine = make(header(hash="given"))
    given = oplog.RequestOp(id="a", tokens=[1, 2, 3, 4], keys=["aa" * 8, "bb" * 8])
    perform(engine, given, resume(3, 5, keys=["cc" * 8]), allocate("a", 4))
    assert {key for _, _, key in engine.state().cached.values()} == {"aa" * 8, "cc" * 8}


@BOTH
def test_items_come_with_the_tokens(make: Any) -> None:
    extra = ExtraKeys(multimodal=[("image", 6, 2)])
    engine = session(make, resume(5, 7, 8, 9, extra=extra), allocate("a", 3))
    plain = session(make, resume(5, 7, 8, 9), allocate("a", 3))
    cached, others = ({tokens: key for _, tokens, key in each.state().cached.values()} for each in (engine, plain))
    assert [cached[tokens] == others[tokens] for tokens in (2, 4, 6, 8)] == [True, True, True, False]


@BOTH
def test_the_prompt_ends_where_the_session_says(make: Any) -> None:
    """Only the last boundary of a prompt is kept: that of the session, not of the request that came."""
    window = {"kind": "sliding_window", "block_size": 2, "window": 2}
    changes = {"groups": [window], "retention_interval": 0}
    kept = []
    for prompt in (9, 5):
        go_on = oplog.ResumeOp(id="a", keep=5, tokens=[7, 8, 9, 10], prompt=prompt)
        engine = session(make, go_on, allocate("a", 4), **changes)
        kept.append(sorted(tokens for _, tokens, _ in engine.state().cached.values()))
    assert kept == [[4, 8], [4]]


@BOTH
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (resume(7), "keep = 7: expected at most the request's 6 tokens"),
        (oplog.ResumeOp(id="a", keep=5, tokens=[7], prompt=7), "prompt = 7: expected 1 to 6 tokens"),
        (resume(5, *range(200)), "tokens = 205: expected at most max_model_len 64 in all"),
        (resume(5, 7, keys=["00"]), "keys = .*expected none"),
    ],
)
def test_a_session_that_cannot_go_on_is_refused(make: Any, operation: oplog.ResumeOp, expected: str) -> None:
    with pytest.raises(OperationError, match=expected):
        perform(session(make), operation)
    if operation.keys is None:
        lifecycle = Lifecycle(header())
        lifecycle.follow(oplog.RequestOp(id="a", tokens=[1, 2, 3, 4, 5, 6]))
        with pytest.raises(OperationError, match=expected):
            lifecycle.follow(operation)


def test_keys_of_tokens_that_are_gone_would_be_seen() -> None:
    whole = "del self.keys[tokens // hash_block_size :]"
    with applied(Patch("hkv.keys.chained:KeyChain.cut", whole, "del self.keys[tokens // hash_block_size + 1 :]")):
        engine = session(NumpyEngine, resume(5, 7, 8, 9), allocate("a", 3))
        found = {key for _, _, key in engine.state().cached.values()}
    assert found != keys_of(NumpyEngine, [1, 2, 3, 4, 5, 7, 8, 9])
