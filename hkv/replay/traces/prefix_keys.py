"""Gives the prefixes of a trace's requests dense integer keys: equal keys, equal tokens from the first on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hkv.replay.traces.reader import TOKENS_PER_ID, TraceRequest


class PrefixKeys:
    """Interns prefixes. Keys are 0, 1, 2, ... in the order in which prefixes are met, so tables by key stay small.

    A prefix of t tokens that ends within the j-th id of a request is known by that id and t, since equal ids mean equal
    prefixes; any block size will do, whether or not it divides `tokens_per_id`. Token lists are known by their tokens.
    Tokens that the trace does not name (generated ones, mostly) make keys that no other request has.

    Args:
      hash_block_size: tokens between two keys of a request.
      tokens_per_id: tokens that one of the `hash_ids` stands for.

    Attributes:
      count: keys given out so far.
    """

    def __init__(self, hash_block_size: int, tokens_per_id: int = TOKENS_PER_ID) -> None:
        self.hash_block_size = hash_block_size
        self.tokens_per_id = tokens_per_id
        self.count = 0
        self._first_key_of_id: dict[int, int] = {}
        self._key_of_block: dict[tuple[int, bytes], int] = {}

    def of(self, request: TraceRequest) -> np.ndarray:
        """Keys of a request, int64 `[(input_length + output_length) // hash_block_size]`.

        Element i names the first `(i + 1) * hash_block_size` tokens of prompt and output together. To be called once
        for each request, in the order of the trace.
        """
        if request.hash_ids is not None:
            known = self._of_hash_ids(request.hash_ids, request.input_length)
        else:
            known = self._of_tokens([*(request.tokens or ()), *(request.output_tokens or ())])
        total = (request.input_length + request.output_length) // self.hash_block_size
        fresh = self._take(total - len(known)) + np.arange(total - len(known), dtype=np.int64)
        return np.concatenate([known, fresh])

    def _take(self, count: int) -> int:
        first = self.count
        self.count += count
        return first

    def _of_hash_ids(self, hash_ids: list[int], input_length: int) -> np.ndarray:
        per_id, step = self.tokens_per_id, self.hash_block_size
        firsts = np.empty(len(hash_ids), np.int64)
        for index, hash_id in enumerate(hash_ids):
            first = self._first_key_of_id.get(hash_id)
            if first is None:
                first = self._take((index + 1) * per_id // step - index * per_id // step)
                self._first_key_of_id[hash_id] = first
            firsts[index] = first
        blocks = np.arange(min(input_length, len(hash_ids) * per_id) // step, dtype=np.int64)
        index = ((blocks + 1) * step - 1) // per_id
        return firsts[index] + blocks - index * per_id // step

    def _of_tokens(self, tokens: list[int]) -> np.ndarray:
        size = self.hash_block_size
        data = np.asarray(tokens, np.uint32).tobytes()
        keys = np.empty(len(tokens) // size, np.int64)
        parent = -1
        for index in range(len(keys)):
            block = (parent, data[4 * index * size : 4 * (index + 1) * size])
            key = self._key_of_block.get(block)
            if key is None:
                key = self._key_of_block[block] = self._take(1)
            keys[index] = parent = key
        return keys


def keys_of_ids(
    requests: Sequence[TraceRequest], served: Sequence[bool], hash_block_size: int, tokens_per_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """The keys that `PrefixKeys` gives requests with `hash_ids`, of all of them at once.

    Args:
      requests: in order of arrival; none has tokens.
      served: of each, whether it has keys.
      hash_block_size: tokens between two keys of a request.
      tokens_per_id: tokens that one of the `hash_ids` stands for.

    Returns:
      int32[m], the keys of one request after the other's; int64[n + 1], where each request's begin, and the end.
    """
    step, there = hash_block_size, np.asarray(served, bool)
    ids = [request.hash_ids or [] if has else [] for request, has in zip(requests, served, strict=True)]
    counts = np.array([len(each) for each in ids], np.int64)
    prompts = np.where(there, [request.input_length for request in requests], 0)
    lengths = np.where(there, [request.input_length + request.output_length for request in requests], 0)
    numbers: dict[int, int] = {}
    which = np.fromiter(
        (numbers.setdefault(each, len(numbers)) for some in ids for each in some), np.int64, counts.sum()
    )
    first = np.flatnonzero(np.diff(np.maximum.accumulate(which), prepend=-1))
    owner = np.repeat(np.arange(len(ids)), counts)
    place = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    begun, ended = place * tokens_per_id // step, (place + 1) * tokens_per_id // step
    known = np.minimum(prompts, counts * tokens_per_id) // step
    totals = lengths // step
    # Keys are taken in the order of the trace: of each request those of ids that are new, then those of no id.
    taken = np.zeros(len(which), np.int64)
    taken[first] = (ended - begun)[first]
    new = np.bincount(owner, taken, len(ids)).astype(np.int64)
    start = np.cumsum(new + totals - known) - (new + totals - known)
    before = np.cumsum(taken) - taken - np.repeat(np.cumsum(new) - new, counts)
    key_of_id = (start[owner] + before)[first][which]
    named = np.clip(np.minimum(ended, known[owner]) - begun, 0, None)
    # Keys of a request follow each other in runs: one for each of its ids, and one for what no id names.
    ids_at, rest_at = np.arange(len(which)) + owner, np.cumsum(counts) + np.arange(len(ids))
    sizes, begins = np.zeros((2, len(which) + len(ids)), np.int64)
    sizes[ids_at], sizes[rest_at] = named, totals - known
    begins[ids_at], begins[rest_at] = key_of_id, start + new
    begins -= np.cumsum(sizes) - sizes
    ends = np.concatenate([[0], np.cumsum(totals)])
    return np.arange(ends[-1], dtype=np.int32) + np.repeat(begins.astype(np.int32), sizes), ends
