"""Failures in words: the kind of mistake, and the first place at which it shows.

A kind is a mistake that leaves exactly these bytes (`hkv.testing.kernels.mistakes`), for chunks and attention the
definition itself with another argument, or, where none does, what all wrong elements have in common: NaN payloads, the
last bit, slots that nobody has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from hkv.layout.views.numpy import numpy_dtype, view
from hkv.testing.kernels import definition
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import CHUNKED, Case, is_far
from hkv.testing.kernels.mistakes import Changes, explanations

UNEXPLAINED = "bytes differ in a way that no known mistake explains"
UNWRITTEN = "some of the slots are not written"
OVERWRITTEN = "slots that no token or block of the call has are overwritten"
PAYLOADS = "payloads of NaN are lost (bits are converted, not copied; lacks='NaN payloads' leaves NaNs out)"
VAGUE = (UNWRITTEN, OVERWRITTEN)
"""Kinds that name a mistake without its cause: reported where few failures have an explanation."""

MOST = 600
"""Wrong bytes that are looked at one by one."""

Place = tuple[str, int, int, int, int]
"""Part, layer, block, slot and head of a row of elements in the pool."""


def kinds(call: Call, wanted: Changes, got: Changes, error: str) -> list[str]:
    """Names of what explains a failure, most telling first; at least one."""
    if error:
        return [_error(error)]
    found = [*_inputs(call, got)]
    if call.case.operation in CHUNKED:
        found += definition.chunk_explanations(call, got)
    elif call.case.operation == "attention":
        found += definition.attention_explanations(call)
    else:
        found += explanations(call, got)
    found += _facts(call, wanted, got)
    if not len(got[0]):
        found.append("nothing is written")
    return [*dict.fromkeys(found), UNEXPLAINED]


RAISES = "the kernel raises"
HANGS = "the kernel did not return"
GROWS = "the kernel took more"
COPIED = "all of a pool of more than 2^31 elements is read or copied? 'lacks=far blocks' leaves these out"
STRAYS = "memory outside of all arrays is touched, or worse"


def is_error(kind: str) -> bool:
    """True if a kind only says that an error was raised."""
    return kind.startswith((RAISES, STRAYS))


def hangs(kind: str) -> bool:
    """True if a kind says that the kernel did not return, or takes all memory: each further try takes as long."""
    return kind.startswith((HANGS, GROWS))


def _error(error: str) -> str:
    name, _, said = error.partition(": ")
    if name in ("ProcessHung", "ProcessGrew"):
        return f"the kernel {said}"
    if name == "ProcessDied":
        return f"{STRAYS}: the kernel {said}"
    return "the result has another shape" if name == "KernelResultError" else f"{RAISES} {name}"


def _inputs(call: Call, got: Changes) -> Iterator[str]:
    outputs = {where.offset for where in call.outputs.values()}
    for section in call.sections:
        where = section.view
        pack = call.case.operation
        given = section.name.startswith("tensor") if pack == "unpack" else section.name == "objects"
        if where.offset in outputs or (pack in CHUNKED and given):
            continue
        if np.any((got[0] >= where.offset) & (got[0] < where.end)):
            yield f"an input is changed: {section.name}"


# Facts: what all wrong elements have in common.


def _facts(call: Call, wanted: Changes, got: Changes) -> Iterator[str]:
    addresses, right, wrong = differing(call, wanted, got)
    if call.case.operation in CHUNKED or not len(addresses):
        return
    places = [_located(call, int(address)) for address in addresses[:MOST]]
    if any(place is None for place in places):
        ends = (call.pool, call.pool + call.placement.end)
        stray = [a for a, place in zip(addresses.tolist(), places, strict=False) if place is None]
        inside = all(ends[0] <= address < ends[1] for address in stray)
        yield (
            "bytes between blocks that belong to nobody are written"
            if inside
            else "bytes outside of all arrays are written"
        )
        return
    if call.outputs:
        return
    facts = list(_number_facts(call, addresses[:MOST], right, wrong))
    if PAYLOADS in facts:  # first: XLA quiets every NaN that it copies, those of slots that nobody named too
        yield PAYLOADS
        return
    named = {place[1:4] for place in map(functools.partial(_located, call), wanted[0][:MOST].tolist()) if place}
    if all(place is not None and place[1:4] not in named for place in places):
        yield OVERWRITTEN
        return
    yield from facts
    if not set(got[0].tolist()) & set(addresses.tolist()):
        yield UNWRITTEN


def _number_facts(call: Call, addresses: np.ndarray, right: np.ndarray, wrong: np.ndarray) -> Iterator[str]:
    """Facts about wrong elements as numbers."""
    parts = {place[0] for place in (_located(call, int(address)) for address in addresses) if place}
    after = {int(a): (int(r), int(w)) for a, r, w in zip(addresses, right, wrong, strict=False)}
    pairs = []
    for name in parts:
        cells, dtype = call.placement.cells[name], numpy_dtype(call.placement.part(name).dtype)
        starts = {a - found[1] for a in after if (found := cells.locate(a - call.pool)) is not None}
        for start in starts:
            raw = [after.get(start + byte) for byte in range(dtype.itemsize)]
            now = call.memory.array[start : start + dtype.itemsize]
            expected = bytes(int(now[i]) if pair is None else pair[0] for i, pair in enumerate(raw))
            pairs.append((np.frombuffer(expected, dtype)[0], now.copy().view(dtype)[0]))
    if not pairs:
        return
    words = [tuple(int(one.view(f"u{one.itemsize}")) for one in pair) for pair in pairs]
    numbers = [(float(one), float(other)) for one, other in pairs]
    if all(abs(one - other) <= 1 for one, other in words) and all(np.isfinite(other) for _, other in numbers):
        yield "numbers are rounded differently, by the last bit"
    if any(np.issubdtype(one.dtype, np.integer) for one, _ in pairs):
        return
    if all(np.isnan(one) for one, _ in numbers):
        yield PAYLOADS
    elif all(other == 0 for _, other in numbers) and all(abs(one) < 1e-4 for one, _ in numbers):
        yield "subnormal numbers become zero"
    elif all(np.isinf(other) or np.isnan(other) for _, other in numbers):
        yield "numbers beyond the type's range are not saturated"


def differing(call: Call, wanted: Changes, got: Changes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Addresses of bytes that are wrong, what they must be, and what they are."""
    addresses = np.union1d(wanted[0], got[0]).astype(np.int64)
    held = call.before.read(addresses)
    right, wrong = held.copy(), held.copy()
    right[np.searchsorted(addresses, wanted[0])] = wanted[1]
    wrong[np.searchsorted(addresses, got[0])] = got[1]
    bad = right != wrong
    return addresses[bad], right[bad], wrong[bad]


def _located(call: Call, address: int) -> Place | None:
    """Row of elements of the pool, or of an output, that a byte belongs to."""
    for name, where in call.outputs.items():
        if found := where.locate(address):
            row, head = found[0][:2]
            return (f"result {name}", call.case.layer, row // call.case.block_size, row % call.case.block_size, head)
    for name, cells in call.placement.cells.items():
        if found := cells.locate(address - call.pool):
            layer, block, piece, head, slot = found[0][:5]
            return name, layer, block, piece * cells.shape[4] + slot, head
    return None


# Sentences.


def told(kind: str, call: Call, wanted: Changes, got: Changes, error: str) -> str:
    """A failure in lines; the first begins with the kind."""
    case = call.case
    lines = [kind]
    if error:
        said = error.partition(": ")[2] or "no message"
        if error.startswith(("ProcessDied", "ProcessHung", "ProcessGrew")):
            said = COPIED if kind.startswith(GROWS) and is_far(case) else ""
        lines = [f"{kind}: {said}" if said else kind]
    elif case.operation in CHUNKED:
        lines = [f"{kind}: {_chunk_place(call, wanted, got)}"]
    elif len(differing(call, wanted, got)[0]):
        lines = [f"{kind}: {_sentence(call, wanted, got)}"]
    lines.append(f"case: {case.operation}, {case}")
    lines.append(f"ids: {_ids(case)}")
    return "\n".join(lines)


def _ids(case: Case) -> str:
    if case.operation == "write":
        pairs = (
            f"{slot // case.block_size}/{slot % case.block_size}" if slot >= 0 else str(slot) for slot in case.slots
        )
        return f"block/slot {', '.join(pairs)}"
    if case.operation == "copy_blocks":
        return ", ".join(f"{one} to {other}" for one, other in zip(case.table, case.targets, strict=True))
    if case.operation == "attention":
        rows = zip(case.tables, case.lengths, case.queries, strict=True)
        return "; ".join(f"{list(row)} of {length} tokens, {new} new" for row, length, new in rows)
    return ", ".join(map(str, case.table))


def _chunk_place(call: Call, wanted: Changes, got: Changes) -> str:
    addresses, right, wrong = differing(call, wanted, got)
    first = int(addresses[0])
    for section in call.sections:
        if section.view.offset <= first < section.view.end:
            row, byte = divmod(first - section.view.offset, section.view.strides[0])
            return f"row {row}, byte {byte} of {section.name} is {wrong[0]:#04x}, expected {right[0]:#04x}"
    return f"byte {first}, outside of all arrays"


def _sentence(call: Call, wanted: Changes, got: Changes) -> str:
    """The first wrong row, and whose content it holds."""
    addresses, right, wrong = differing(call, wanted, got)
    for address in addresses.tolist():
        place = _located(call, address)
        if place is None:
            continue
        part, layer, block, slot, head = place
        where = f"block {block}, slot {slot}, head {head} of the {part}"
        if part.startswith("result"):
            where = f"entry {block}, slot {slot}, head {head} of the {part}"
        where += f" in layer {layer}" if call.case.layers > 1 else ""
        holder = _holder(call, place, address)
        if holder:
            return f"{where} {holder}"
        index = int(np.searchsorted(addresses, address))
        return f"{where} has a byte {wrong[index]:#04x}, expected {right[index]:#04x}"
    first = int(addresses[0])
    if call.pool <= first < call.pool + call.placement.end:
        return f"byte {first - call.pool} of the pool, which no slot has, is changed"
    return f"byte {first - call.pool} counted from the pool's first, outside of it, is changed"


def _holder(call: Call, place: Place, address: int) -> str:
    """Owner of the content that a row holds, in words; empty if it is nobody's."""
    part = place[0].removeprefix("result ")
    if place[0].startswith("result"):
        where = call.outputs[part]
        index = place[2] * call.case.block_size + place[3]
        if part not in call.placement.cells or call.case.operation == "attention":
            return ""
        row = view(call.memory.array, where)[index, place[4]].tobytes()
    else:
        row = _row(call, part, *place[1:], now=True)
        if row == _row(call, part, *place[1:], now=False):
            return "is as it was before: nothing is written there"
    if not any(row):
        return "is zero"
    if len(row) < 2:
        return ""
    for name, owner in _owners(call, place):
        if owner == row:
            return f"holds what belongs to {name}"
    return ""


def _row(call: Call, part: str, layer: int, block: int, slot: int, head: int, now: bool) -> bytes:
    cells = call.placement.cells[part]
    piece, inside = divmod(slot, cells.shape[4])
    step = cells.strides[5]
    first = call.pool + cells.address(layer, block, piece, head, inside, 0)
    each = first + np.arange(cells.shape[5])[:, None] * step + np.arange(cells.itemsize)
    return (call.memory.array[each] if now else call.before.read(each.ravel())).tobytes()


def _owners(call: Call, place: Place) -> Iterator[tuple[str, bytes]]:
    """Rows of content by whose they are: new ones by token and head, old ones by block, slot and head."""
    case = call.case
    for part, values in call.values.items():
        for token in range(len(values)):
            for head in range(values.shape[1]):
                slot = case.slots[token] if case.operation == "write" else case.table[token // case.block_size]
                if case.operation != "write":
                    slot = slot * case.block_size + token % case.block_size if slot >= 0 else slot
                where = f"block {slot // case.block_size}, slot {slot % case.block_size}" if slot >= 0 else "padding"
                side = "" if part == place[0] else f" of the {part}"
                side += f" in layer {case.layer}" if case.layer != place[1] else ""
                yield f"{where}, head {head}{side}", values[token, head].tobytes()
    for part in call.placement.cells:
        for layer in range(case.layers):
            for block in range(min(case.blocks, 64)):
                for slot in range(case.block_size):
                    for head in range(call.placement.cells[part].shape[3]):
                        side = "" if part == place[0].removeprefix("result ") else f" of the {part}"
                        side += f" in layer {layer}" if layer != place[1] else ""
                        name = f"block {block}, slot {slot}, head {head}{side}"
                        yield name, _row(call, part, layer, block, slot, head, now=False)


__all__ = ["UNEXPLAINED", "Changes", "differing", "kinds", "told"]
