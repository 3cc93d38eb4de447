"""Lowers a text, plain Python over the records of a `Layout`, to one JAX program in which no array is copied.

A program is a function of the state, a dict of flat int32 arrays and scalars by name (`Layout.arrays_of`), and of
numbers; it returns the state after a rule. It is made in two passes:

1. *Read* (`expressions`, `statements`, `loops`): the rule is executed over `values` that are Python's where they are
   known, so that what depends on them alone leaves nothing: numbers in the text, enumerations, scalars of `static`. All
   else becomes instructions (`code`); what is computed twice is left out (`sharing`), and what a loop does not change
   leaves it (`hoisting`). Rules are read where they are called.
2. *Emit* (`emission`): reads of what a loop changes stand in a `lax.cond`, a *segment*, which only numbers leave: as
   many instructions as read nothing that one of them writes. Writes follow their segment; one that must not happen goes
   to a spare element. Loops carry what they change; a branch with loops that write, or with many writes, is a loop of
   at most one trip, others are predicated.

What a text may use: parameters, locals, tuples of them; None; fields, lines, columns, arrays, tables, scalars of parts;
`if`, `while`, `for` over a range or a tuple, `break`, `continue`, `return` anywhere; conditional expressions, `and`,
`or`, `not`, comparisons, `is`, `in` a tuple; `+ - * // % & | ^ << >>`, `min`, `max`, `int`, `bool`; rules of a text,
with keywords and defaults. `assert` and `clause` are for the plain run. All else is a `TextError` with file and line.
`docs/lowering.md` says why, with a picture.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from hkv.lowering.code import Among, Code
from hkv.lowering.emission import Emission, differs, i32
from hkv.lowering.hoisting import hoist
from hkv.lowering.loops import Frame
from hkv.lowering.sharing import share
from hkv.lowering.values import MismatchError, Num, Path, Row, TextError, numbers
from reference.language import Layout

State = dict[str, Any]

__all__ = ["TextError", "lowered", "over_lanes"]


def lowered(
    layout: Layout,
    rule: FunctionType,
    static: Mapping[str, int] | None = None,
    known: tuple[int, ...] = (),
    among: Among = MappingProxyType({}),
) -> Callable[..., State]:
    """A rule as a function of state and numbers, to be compiled by `jax.jit` with the state donated.

    Args:
      layout: of the cache that is the rule's first parameter.
      rule: a function of a text.
      static: values of scalars that prune the program; the state has them not.
      known: the rule's last arguments, where they are Python values.
      among: of arrays, the only values that the rule ever reads there: they prune the program, too.

    Returns:
      A function of the state, int32 arrays and scalars by name, and of int32 scalars, the rule's other arguments; it
      returns the state after the rule.

    Raises:
      TextError: when it is traced: the text uses what cannot be lowered.
    """

    def run(state: State, *given: Any) -> State:
        _check(layout, static or {}, state, 0)
        opaque = differs(state[next(name for name in layout.scalars if name in state)])
        arguments = [i32(jnp.asarray(n)) for n in given]
        return _traced(layout, rule, static or {}, known, among, state, arguments, opaque, (0, 1))

    return run


def over_lanes(
    layout: Layout,
    rule: FunctionType,
    static: Mapping[str, int] | None = None,
    known: tuple[int, ...] = (),
    among: Among = MappingProxyType({}),
) -> Callable[..., State]:
    """`lowered`, of several caches one after the other in one program: state and numbers have a leading axis."""

    def run(state: State, *given: Any) -> State:
        _check(layout, static or {}, state, 1)
        count = next(iter(state.values())).shape[0]
        shapes, scalars = {n: x.shape for n, x in state.items()}, [n for n in state if n in layout.scalars]

        def one(carry: Any) -> Any:
            lane, arrays = carry
            opaque = differs(lane)
            wanted = [*(arrays[n] for n in scalars), *given]
            values = lax.cond(opaque, lambda: [x[lane] for x in wanted], lambda: [i32(0) for _ in wanted])
            here = {**arrays, **dict(zip(scalars, values, strict=False))}
            numbers = values[len(scalars) :]
            after = _traced(layout, rule, static or {}, known, among, here, numbers, opaque, (lane, count))
            return lane + 1, {n: arrays[n].at[lane].set(after[n]) if n in scalars else after[n] for n in arrays}

        flat = {n: x.reshape(-1) for n, x in state.items()}
        _, arrays = lax.while_loop(lambda carry: carry[0] < count, one, (jnp.int32(0), flat))
        return {n: x.reshape(shapes[n]) for n, x in arrays.items()}

    return run


@dataclasses.dataclass
class Instructions:
    """A rule as instructions.

    Attributes:
      code: the instructions. scalars: those of the cache before it, by name. parameters: the rule's numbers. kept:
      scalars after it.
    """

    code: Code
    scalars: dict[str, Num]
    parameters: list[Num]
    kept: list[Any]


def read(
    layout: Layout, rule: FunctionType, static: Mapping[str, int], known: Any, among: Among, arrays: State, given: int
) -> Instructions:
    """A rule read into instructions, of which none is twice what one will do for; `given`: how many numbers it takes.

    Raises:
      TextError: the text uses what cannot be lowered.
    """
    firsts = {flat.table: name for name, flat in layout.arrays.items() if flat.table and not flat.line}
    lines = {name: firsts[flat.table] for name, flat in layout.arrays.items() if flat.line}
    widths = {name: arrays[name].shape[0] // arrays[of].shape[0] for name, of in lines.items()}
    code = Code(layout, static, widths, among)
    scalars = {name: Num() for name in layout.scalars if name not in static}
    names = {name: static[name] if name in static else scalars[name] for name in layout.scalars}
    parameters = [Num() for _ in range(given)]
    frame = Frame(
        code,
        rule,
        {
            f".{n}": x if layout.scalars[n] is int else Row(x, layout.table_of(layout.scalars[n]))
            for n, x in names.items()
        },
        True,
    )
    place = ast.parse(rule.__name__, mode="eval").body
    try:
        frame.call(place, rule, [Path(""), *parameters, *known], {})
    except MismatchError as mismatch:
        raise frame.fail(place, mismatch) from None
    kept = share(code.block, [numbers(frame.vars[f".{name}"])[0] for name in scalars])
    hoist(code.block)
    return Instructions(code, scalars, parameters, share(code.block, kept))


def _traced(
    layout: Layout, rule: FunctionType, static: Any, known: Any, among: Among, state: State, given: Any, *where: Any
) -> State:
    """The state after a rule; `where`: as `Emission` takes it."""
    arrays = {name: state[name] for name in state if name in layout.arrays}
    program = read(layout, rule, static, known, among, arrays, len(given))
    emission = Emission(layout, arrays, *where)
    values = {number: state[name] for name, number in program.scalars.items()}
    values |= dict(zip(program.parameters, given, strict=True))
    after = emission.emit(program.code.block, values, program.kept)
    return emission.arrays | {name: i32(x) for name, x in zip(program.scalars, after, strict=True)}


def _check(layout: Layout, static: Mapping[str, int], state: State, lanes: int) -> None:
    """Refuses a state that is not the layout's."""
    wanted = {*layout.arrays, *layout.scalars} - static.keys()
    if wanted != state.keys():
        missing, more = sorted(wanted - state.keys()), sorted(state.keys() - wanted)
        raise ValueError(f"state: expected {len(wanted)} arrays and scalars; missing {missing}, unknown {more}")
    for name, array in state.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"state[{name!r}]: expected int32, got {array.dtype}")
        if array.ndim != (axes := lanes + (name in layout.arrays)):
            raise ValueError(f"state[{name!r}]: expected {axes} axis or axes, got shape {array.shape}")
