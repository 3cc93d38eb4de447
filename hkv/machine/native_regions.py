"""Has XLA:CPU compile runs of small operations to one piece of machine code each.

XLA:CPU makes a kernel of every fusion: 20 ms of compilation and half a microsecond of dispatch for each, whatever it
computes, and a serving step is some 150 of them over a few hundred numbers. Calls under the attribute
`xla_cpu_small_call`, which XLA's own pass gives to short loops (`hkv.machine.native_loops`), become one function
instead, if they are not inlined first. Scatters cannot stand in them. So a program is split there: all that can be
computed before the next scatters is one call.

The attribute decides nothing but time: XLA runs the calls operation by operation where it does not know it. Programs
for other platforms have no such calls.
"""

# JAX types its configuration, and the parts of jaxprs, as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

# Not inlined: the call is the unit that XLA:CPU compiles to one function.
MARKS = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""Frontend attributes of XLA for a call that is compiled as one function."""

BOUNDARIES = (
    "scatter",
    "sort",
    "dynamic_update_slice",
    "dot_general",
    "conv_general",
    "custom_call",
    "ffi_call",
    "optimization_barrier",
)
"""Beginnings of the names of primitives that cannot stand in such a call, or that `jax.vmap` makes scatters of."""

CALLS = ("jit", "pjit")
"""Primitives that are calls of functions."""

LEAST = 2
"""Operations that are worth a call."""


@dataclasses.dataclass(frozen=True)
class NativeOperation:
    """An equation of a program.

    Attributes:
      equation: primitive and parameters.
      reads: numbers of the values that it reads, or literals.
      writes: numbers of its results.
      is_boundary: whether it stands between regions.
    """

    equation: Any
    reads: tuple[Any, ...]
    writes: tuple[int, ...]
    is_boundary: bool

    @property
    def values(self) -> Iterator[int]:
        """The numbers of the values that it reads."""
        return (name for name in self.reads if isinstance(name, int))


class Program:
    """A traced function: its operations in order, those of inner functions with boundaries among them.

    Args:
      closed: the function's jaxpr.

    Attributes:
      operations: those that the results need.
      constants: values that the function closes over, by number.
      inputs: numbers of the arguments.
      results: numbers of the results, or literals.
    """

    def __init__(self, closed: core.ClosedJaxpr) -> None:
        self._numbers = itertools.count()
        self.constants: dict[int, Any] = {}
        self.inputs = [next(self._numbers) for _ in closed.jaxpr.invars]
        self.operations: list[NativeOperation] = []
        self.results = self._inline(closed, self.inputs)
        needed = {name for name in self.results if isinstance(name, int)}
        # Backwards, so that what only dead operations read is dead too. Operations here have no effects but their
        # results.
        for operation in reversed(self.operations[:]):
            if needed.isdisjoint(operation.writes):
                self.operations.remove(operation)
            else:
                needed.update(operation.values)

    def _inline(self, closed: core.ClosedJaxpr, given: list[Any]) -> list[Any]:
        """Adds the operations of a function that is called with these values; returns its results."""
        jaxpr = closed.jaxpr
        names: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
            names[variable] = next(self._numbers)
            self.constants[names[variable]] = value
        for equation in jaxpr.eqns:
            reads = [_name(atom, names) for atom in equation.invars]
            # A call with a boundary inside is opened up, so that what stands before and after the boundary can join
            # its neighbours.
            bound = _is_boundary(equation)
            if bound and equation.primitive.name in CALLS:
                writes = self._inline(equation.params["jaxpr"], reads)
            else:
                writes = [next(self._numbers) for _ in equation.outvars]
                self.operations.append(NativeOperation(equation, tuple(reads), tuple(writes), bound))
            names.update(zip(equation.outvars, writes, strict=True))
        return [_name(atom, names) for atom in jaxpr.outvars]

    def runs(self) -> list[list[NativeOperation]]:
        """The operations in the order in which they run: runs of those that make a region, and boundaries alone.

        A region has all operations that need the results of equally many boundaries, one after the other. A boundary
        waits for all that reads, in the program's order, what it changes, so that it may change it in place.
        """
        depth = dict.fromkeys([*self.inputs, *self.constants], 0)
        read = dict(depth)
        inside: dict[int, list[NativeOperation]] = {}
        after: dict[int, list[NativeOperation]] = {}
        for operation in self.operations:
            bound = operation.is_boundary
            # A boundary may overwrite what it is given: it has to stand behind every region that reads that, not only
            # behind those that make it.
            at = max((max(depth[v], read[v] if bound else 0) for v in operation.values), default=0)
            (after if bound else inside).setdefault(at, []).append(operation)
            read.update((value, max(read[value], at)) for value in operation.values)
            depth.update(dict.fromkeys(operation.writes, at + bound))
            read.update(dict.fromkeys(operation.writes, at))
        found: list[list[NativeOperation]] = []
        for at in sorted(inside.keys() | after.keys()):
            found += [inside[at]] if at in inside else []
            found += [[boundary] for boundary in after.get(at, [])]
        return found


class Dispatched:
    """A function compiled as a program of its own, in regions where XLA:CPU compiles it. Its first argument is donated.

    Inside another program it is the function as it is: there XLA leaves out results that nobody reads, and with them
    what makes a region read its arguments (`_having_read`).

    Args:
      function: of trees of arrays; its results are integers and truth values.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._program = jax.jit(functools.partial(_split, function), donate_argnums=0)

    def __call__(self, *trees: Any) -> Any:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))
        return self._function(*trees) if traced else self._program(*trees)

    def trace(self, *trees: Any) -> Any:
        """The program for such arguments, to be lowered: `jax.stages.Traced`."""
        return self._program.trace(*trees)


def _split(function: Callable[..., Any], *trees: Any) -> Any:
    """The function's results, by regions where the program is compiled for a CPU."""
    leaves, structure = jax.tree.flatten(trees)
    closed, shapes = jax.make_jaxpr(lambda *given: function(*structure.unflatten(given)), return_shape=True)(*leaves)
    regions, plain = functools.partial(_run, Program(closed)), core.jaxpr_as_fun(closed)
    return jax.tree.structure(shapes).unflatten(lax.platform_dependent(*leaves, cpu=regions, default=plain))


def _run(program: Program, *arguments: jax.Array) -> list[Any]:
    """The results of a program, computed region by region."""
    values = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
    runs = program.runs()
    last = {value: at for at, run in enumerate(runs) for operation in run for value in operation.values}
    last |= {value: len(runs) for value in program.results if isinstance(value, int)}
    for at, run in enumerate(runs):
        made = {value for operation in run for value in operation.writes}
        # Only what a later run reads leaves the region: results that nobody reads would be written to memory.
        kept = sorted(value for value in made if last.get(value, -1) > at)
        if run[0].is_boundary or len(run) < LEAST:
            for operation in run:
                _bind(operation, values)
        else:
            needed = sorted({value for operation in run for value in operation.values}.difference(made))
            given = {value: values[value] for value in needed if value not in program.constants}
            values.update(_call(run, program.constants, given, kept))
    return [values[name] if isinstance(name, int) else name.val for name in program.results]


def _call(
    run: list[NativeOperation], constants: dict[int, Any], given: dict[int, jax.Array], kept: list[int]
) -> dict[int, jax.Array]:
    """The values of `kept` that a run of operations makes of others, computed in one call."""

    def region(*arguments: jax.Array) -> list[Any]:
        values = {**constants, **dict(zip(given, arguments, strict=True))}
        with set_xla_metadata(**dict.fromkeys(MARKS)):  # calls inside may be inlined
            for operation in run:
                _bind(operation, values)
            values[kept[0]] = _having_read(arguments, values[kept[0]])
        return [values[value] for value in kept]

    with set_xla_metadata(**MARKS):
        return dict(zip(kept, jax.jit(region)(*given.values()), strict=True))


def _having_read(arguments: tuple[jax.Array, ...], answer: jax.Array) -> jax.Array:
    """An answer, integers or truth values, so computed that XLA sees every argument used, whichever it needs.

    jaxlib 0.10.2 and 0.11.2 abort on a parameter of such a call that nothing reads. No 32 bits have 64 that are set:
    XLA does not know, and LLVM does, so that nothing of this is executed.
    """
    # One element of each argument is enough to count as a use.
    first = [argument.reshape(-1)[0].astype(jnp.int32) for argument in arguments if argument.size]
    nothing = lax.population_count(functools.reduce(lax.bitwise_or, first, jnp.int32(0))) >> 6
    return answer ^ nothing.astype(answer.dtype)


def _bind(operation: NativeOperation, values: dict[int, Any]) -> None:
    """Computes an operation; of a loop between regions, every trip in regions."""
    equation = operation.equation
    given = [values[name] if isinstance(name, int) else name.val for name in operation.reads]
    primitive = equation.primitive
    if primitive.name == "while" and operation.is_boundary:
        answers = _loop(equation.params, given)
    else:
        answers = primitive.bind(*given, **primitive.get_bind_params(equation.params))
    values.update(zip(operation.writes, answers if primitive.multiple_results else [answers], strict=True))


def _loop(parameters: dict[str, Any], given: list[Any]) -> tuple[Any, ...]:
    """The values that a loop between regions carries in the end, each trip in regions."""
    asks, body = parameters["cond_nconsts"], parameters["body_nconsts"]
    ends, trip = core.jaxpr_as_fun(parameters["cond_jaxpr"]), Program(parameters["body_jaxpr"])
    asked, read, first = given[:asks], given[asks : asks + body], given[asks + body :]
    return lax.while_loop(lambda now: ends(*asked, *now)[0], lambda now: tuple(_run(trip, *read, *now)), tuple(first))


def _name(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, core.Literal) else names[atom]


def _is_boundary(equation: Any) -> bool:
    if equation.primitive.name.startswith(BOUNDARIES):
        return True
    inner = (jaxpr for value in equation.params.values() for jaxpr in _jaxprs(value))
    return any(_is_boundary(each) for jaxpr in inner for each in jaxpr.eqns)


def _jaxprs(parameter: Any) -> Iterator[Any]:
    """The jaxprs in a primitive's parameter."""
    if isinstance(parameter, core.ClosedJaxpr):
        yield parameter.jaxpr
    elif isinstance(parameter, core.Jaxpr):
        yield parameter
    elif isinstance(parameter, tuple | list):
        for each in parameter:
            yield from _jaxprs(each)
