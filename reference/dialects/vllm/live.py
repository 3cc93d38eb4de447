"""Operations of a live scheduler next to the rules' own verbs: computed tokens as it counts them, blocks it keeps.

A live engine's scheduler keeps its own account of computed tokens: of tokens that do not exist yet, and back again when
drafts are rejected or a load fails. It retires, and gives blocks back, also when no request grows or ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from hkv.errors import OperationError
from hkv.keys.chained import PrefixIdentity
from reference.dialects.vllm.manager import Manager
from reference.dialects.vllm.offers import Offer, stands
from reference.dialects.vllm.request import TokenRequest


def computed(manager: Manager, id: str, tokens: int) -> None:
    """`tokens` tokens of a request are computed in all, whatever there were before."""
    if type(tokens) is not int or tokens < 0:
        raise OperationError("tokens", tokens, "an integer of at least 0")
    manager.find(id).num_computed = tokens


def resume(
    manager: Manager,
    id: str,
    keep: int,
    tokens: Sequence[int],
    prompt: int,
    identity: PrefixIdentity | None = None,
    keys: Sequence[str] = (),
) -> None:
    """A request's first `keep` tokens stay and others follow: its session goes on. Its blocks stay as they are.

    Raises:
      OperationError: more tokens than it has, or may have; a prompt that is longer than they are.
    """
    request = manager.find(id)
    if not isinstance(request, TokenRequest):
        raise OperationError("id", id, "a request that came with tokens")
    config = manager.config
    if not 0 <= keep <= request.num_tokens:
        raise OperationError("keep", keep, f"at most the request's {request.num_tokens} tokens")
    length = keep + len(tokens)
    if length > config.max_model_len:
        raise OperationError("tokens", length, f"at most max_model_len {config.max_model_len} in all")
    if not 1 <= prompt <= length:
        raise OperationError("prompt", prompt, f"1 to {length} tokens")
    manager.forget_hit()
    request.resume(keep, tokens, prompt, config.hash_block_size, identity, keys)


def retire(manager: Manager, id: str, processed: int) -> None:
    """Blocks that no token from `processed` on reads are given back (vLLM 0.33 `remove_skipped_blocks`)."""
    manager.find(id)
    for kind in manager.cache.kinds:
        kind.retire(id, processed)


def pop(manager: Manager, id: str) -> None:
    """A running request waits again without its blocks, which stay referenced (vLLM 0.33 `pop_blocks_for_free`)."""
    request = manager.running(id)
    manager.forget_hit()
    for kind in manager.cache.kinds:
        kind.forget(id)
    request.wait()


def release(manager: Manager, blocks: Sequence[int]) -> None:
    """Blocks lose a reference each; those left without become free in this order (vLLM 0.33 `free_blocks`).

    Raises:
      OperationError: a block has fewer references than it is to lose; nothing changed.
    """
    _check(manager, blocks)
    for block in set(blocks):
        if manager.pool.refs[block] < blocks.count(block):
            raise OperationError("blocks", block, "a block with as many references as it is to lose")
    manager.forget_hit()
    manager.pool.release(blocks)


def hold(manager: Manager, blocks: Sequence[int]) -> None:
    """Blocks gain a reference each; free ones leave the queue (vLLM 0.33 `BlockPool.touch`)."""
    _check(manager, blocks)
    manager.forget_hit()
    manager.pool.touch(blocks)


def zeros(manager: Manager) -> list[int]:
    """Blocks that are to be zeroed, group by group, since they were last asked for (vLLM 0.33 `take_new_block_ids`).

    Raises:
      OperationError: the configuration zeroes nothing.
    """
    _check_zeroing(manager)
    blocks = [block for kind in manager.cache.kinds for block in kind.zeros]
    for kind in manager.cache.kinds:
        kind.zeros.clear()
    return blocks


def unwritten(manager: Manager, id: str, tokens: int) -> None:
    """Blocks of a request from `tokens` on are to be zeroed after all (vLLM 0.33 `record_blocks_for_zeroing`).

    A load that failed did not write them.

    Raises:
      OperationError: the configuration zeroes nothing, or `tokens` lies inside a block.
    """
    _check_zeroing(manager)
    manager.running(id)
    kinds = [kind for kind in manager.cache.kinds if manager.config.zeroes(kind.group)]
    for kind in kinds:
        if type(tokens) is not int or tokens < 0 or tokens % kind.block_size:
            raise OperationError("tokens", tokens, f"a multiple of group {kind.group}'s block of {kind.block_size}")
    for kind in kinds:
        kind.zeros += kind.row(id).blocks[tokens // kind.block_size :]


def offloads(manager: Manager) -> dict[str, list[tuple[int, int, int]]]:
    """States that a connector is offered: of each request (group, block, tokens), group by group, since last asked.

    A state that is not in its block any more is not offered (defect offer-outlives-state).
    vLLM 0.33 `take_boundary_state_offloads`.

    Raises:
      OperationError: the configuration offers nothing.
    """
    _check_offloads(manager)
    answer: dict[str, list[tuple[int, int, int]]] = {}
    for kind in manager.cache.kinds:
        for offer in kind.offers:
            if _is_good(manager, offer):
                answer.setdefault(offer.id, []).append((kind.group, offer.block, offer.tokens))
        kind.offers.clear()
    return answer


def finalize(manager: Manager, id: str, in_flight: int) -> list[tuple[int, int, int]]:
    """The ends of a request's prompt inside blocks, where no later token was computed: (group, block, tokens).

    The request is about to end; what is not offered now, never is. vLLM 0.33 `finalize_partial_tail_offloads`.

    Args:
      manager: the cache.
      id: a running request.
      in_flight: computed tokens of it whose steps have not come back.

    Raises:
      OperationError: the configuration offers nothing, or misuse.
    """
    _check_offloads(manager)
    request = manager.running(id)
    if type(in_flight) is not int or in_flight < 0:
        raise OperationError("in_flight", in_flight, "an integer of at least 0")
    tails = [(kind.group, kind.take_tail(id)) for kind in manager.cache.kinds]
    return [
        (group, tail.block, tail.tokens)
        for group, tail in tails
        if tail is not None and not in_flight and request.num_computed == tail.tokens and _is_good(manager, tail)
    ]


def _is_good(manager: Manager, offer: Offer) -> bool:
    return "offer-outlives-state" in manager.config.bugs or stands(manager.pool, offer)


def _check_offloads(manager: Manager) -> None:
    if not manager.config.offloads:
        raise OperationError("offloads", False, "a configuration that offers states to a connector")


def _check_zeroing(manager: Manager) -> None:
    if not manager.config.zeroing:
        raise OperationError("zeroing", False, "a configuration that zeroes new blocks")


def _check(manager: Manager, blocks: Sequence[int]) -> None:
    for block in blocks:
        if type(block) is not int or not 1 <= block < manager.config.num_blocks:
            raise OperationError("blocks", block, f"block ids from 1 to {manager.config.num_blocks - 1}")
