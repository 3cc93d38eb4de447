"""Pages of SGLang's pools at one moment, of a log's `state` (`hkv.contract.snapshot`).

Each component has a pool: pages of full attention, pages of the window, states. The tree has no keys; a page is named
by a digest of the tokens up to its end, so that a name comes and goes with what a request could find there. Pages of
the tree that no request has in its row are cached and nothing else, and so are pages that wait to be sorted free.
"""

from __future__ import annotations

import collections
import hashlib

from hkv.contract.snapshot import Block, Entry, Holder, PoolSnapshot, Snapshot
from hkv.dialects.sglang.log import SLIDING_WINDOW, STATES, Header, State
from hkv.errors import UnsupportedConfigError


def snapshot(header: Header, state: State) -> Snapshot:
    """Pages and states of all pools, as a state tells them."""
    if header.tree:
        raise UnsupportedConfigError("tree", header.tree, "a log that tells of pools, which a tree alone has not")
    kinds = [group["kind"] for group in header.groups]
    size, window = header.groups[0]["block_size"], dict(state.window)
    holders: dict[Block, list[Holder]] = collections.defaultdict(list)
    for id, owned in state.requests.items():
        for column, slot in enumerate(owned.slots[::size]):
            holders[0, slot // size].append((id, 0, column))
            held = next((window[each] for each in owned.slots[column * size :][:size] if each in window), None)
            if held is not None and SLIDING_WINDOW in kinds:
                holders[1, held // size].append((id, 1, column))
        for number, each in enumerate(owned.states):
            holders[kinds.index(STATES), each].append((id, kinds.index(STATES), number))
    pools = (
        PoolSnapshot("states" if kind == STATES else f"{kind} pages", range(1, count + 1), [*pool.free, *pool.waiting])
        for kind, count, pool in zip(kinds, header.num_blocks, state.pools, strict=True)
    )
    references = {block: len(each) for block, each in holders.items()}
    return Snapshot(tuple(pools), holders, references, _entries(header, state))


def _entries(header: Header, state: State) -> dict[Block, Entry]:
    """Pages of the tree, and its states; none where an engine does not show its tree."""
    kinds = [group["kind"] for group in header.groups]
    size, bigrams = header.groups[0]["block_size"], header.eagle and STATES not in kinds
    found: dict[Block, Entry] = {}
    prefixes: list[list[int]] = []
    for node in state.nodes or ():
        before = prefixes[node.parent] if node.parent >= 0 else []
        prefixes.append(before + node.tokens[: len(node.tokens) - bigrams])
        for place in range(0, len(node.slots), size):
            end = len(before) + place + size
            name = hashlib.sha256(repr((node.namespace, prefixes[-1][:end])).encode()).hexdigest()[:8]
            found[0, node.slots[place] // size] = (0, end, name)
            if node.window is not None:
                found[1, node.window[place] // size] = (1, end, name)
        if node.state is not None:
            group, end = kinds.index(STATES), len(prefixes[-1])
            name = hashlib.sha256(repr((node.namespace, prefixes[-1])).encode()).hexdigest()[:8]
            found[group, node.state] = (group, end, name)
    return found
