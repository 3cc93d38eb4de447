"""Kernels under test: a Python function over torch, JAX or NumPy arrays, or a C function of a shared library.

A Python function says by its parameters' names what it takes (`hkv.testing.kernels.call.ARGUMENTS`), and by the
decorator `kernel` what it supports. NumPy arrays and torch tensors share memory with the pool and are changed in place;
JAX arrays are copies, and the changed ones are returned, in the order of the parameters. `NotImplementedError` means
that the case is not supported. A C function takes a `DLTensor *` for each array, an `int64_t` for each whole number and
a `double` for each scale, and returns 0, or anything else for a case that it does not support.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hkv.errors import ConfigError, MissingExtraError
from hkv.foreign import is_library, own_warnings, python_function, split_name
from hkv.layout.strided import StridedView
from hkv.layout.views import torch as torch_views
from hkv.layout.views.numpy import view
from hkv.processes import PATIENCE
from hkv.testing.kernels.call import ARGUMENTS, PARTS, Cache, Call, Deferred
from hkv.testing.kernels.cases import CHUNKED, FEATURES, OPERATIONS, UNASKED, Case, Supports, Unavailable
from hkv.testing.kernels.native import Worker
from hkv.testing.kernels.placement import CONTENTS, SCALED

Function = TypeVar("Function", bound=Callable[..., Any])

DECLARED = "hkv_supports"
"""Attribute of a function that holds what it supports."""

WRITERS = ("write", "scatter", "copy_blocks", "zero", "pack", "unpack")
"""Operations that change what they are given."""

KNOWN = frozenset(
    [name for names in ARGUMENTS for name in names.split(", ") if name != "..."]
    + [f"{part}_{kind}" for part in PARTS for kind in ("cache", "caches", "out")]
    + ["kv_cache"]
)

KernelResultError = type(
    "KernelResultError", (Exception,), {"__doc__": "A kernel returned something of another shape."}
)


def kernel(operation: str, **supports: Any) -> Callable[[Function], Function]:
    """Decorator that declares what a function does and supports, with the fields of `Supports`."""
    declared = Supports(operation=operation, **supports)

    def made(function: Function) -> Function:
        setattr(function, DECLARED, declared)
        return function

    return made


Performing = Callable[["Target", Case | None], None]


@dataclasses.dataclass
class Target:
    """A kernel, ready to be called.

    Attributes:
      name: as the user wrote it.
      supports: what may be asked of it.
      wanted: names of its parameters, in order.
      optional: those of them that may be left out.
      function: the function itself, None for C.
      worker: the process in which a C function runs.
      device: device of torch tensors, empty for where memory is.
      performing: called with this and a case before the function runs, and with None after it.
      apart: the function runs in a process that it may end: behind its inputs lie pages that nobody may touch.
    """

    name: str
    supports: Supports
    wanted: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    function: Callable[..., Any] | None = None
    worker: Worker | None = None
    device: str = ""
    performing: Performing = lambda target, case: None
    apart: bool = False

    def call(self, case: Case) -> Call:
        """A case in memory that the kernel can be let loose on."""
        return Call(case, self.worker is not None, self.apart or self.worker is not None)

    def run(self, call: Call) -> None:
        """Performs a case on its memory.

        Raises:
          Unavailable: the kernel cannot be asked this case, or says that it does not support it.
          KernelResultError: what it returned does not fit.
          Exception: whatever the kernel raised.
        """
        arguments = self._chosen(call)
        if self.worker is not None:
            self.worker.call(call.memory, [arguments[name] for name in self.wanted])
            return
        assert self.function is not None
        self.performing(self, call.case)
        try:
            arrays = _ARRAYS[self.supports.arrays](call.memory.array, self.device)
            given = {name: _converted(value, arrays.array) for name, value in arguments.items()}
            with own_warnings(), call.memory.guarded():
                result = self.function(**given)
            self._keep(call, arguments, result)
            arrays.finish()  # waits for a device, on which a kernel may still be at work
        except NotImplementedError as refusal:
            raise Unavailable(str(refusal).split("\n")[0] or "not implemented") from None
        finally:
            self.performing(self, None)

    def _chosen(self, call: Call) -> dict[str, Any]:
        """The arguments that the kernel asks for, caches in the order of its axes."""
        case, found = call.case, {}
        for name in self.wanted:
            if name in call.arguments:
                value = call.arguments[name]
                found[name] = arranged(value.view, self.supports.axes) if isinstance(value, Cache) else value
            elif name not in self.optional:
                raise Unavailable(f"layout {case.layout}" if name in ("layout", "kv_cache") else case.content)
        if case.operation not in ("pack", "unpack"):
            self._check_parts(call)
        for feature, names in (("window", ("window",)), ("skip", ("skip",))):
            if getattr(case, feature) and not set(names) <= set(found):
                raise Unavailable(feature)
        if case.source_dtype and case.content != SCALED and "k_scale" not in found:
            raise Unavailable("tensor scales")
        return found

    def _check_parts(self, call: Call) -> None:
        """Refuses content of which the kernel sees only some parts."""
        case, parts = call.case, [part.name for part in call.placement.content]
        if _not_taken(parts, case.operation, self.wanted, bool(case.source_dtype)):
            raise Unavailable(case.content)

    def _keep(self, call: Call, arguments: Mapping[str, Any], result: Any) -> None:
        """Puts what was returned where it belongs."""
        functional = self.supports.functional
        if functional is None:
            functional = self.supports.arrays == "jax"
        if call.case.operation in WRITERS:
            if functional:
                changed = [arguments[name] for name in self.wanted if _is_changed(name, call.case.operation)]
                results = list(result) if isinstance(result, tuple | list) else [result]
                if len(changed) == 1 and isinstance(changed[0], list) and not isinstance(results[0], tuple | list):
                    results = [results]
                for where, array in zip(changed, results, strict=False):
                    _assign(call, where, array)
            return
        given = any(name in arguments for name in ("out", *(f"{part}_out" for part in call.outputs)))
        if result is None or (given and not functional):
            return
        if isinstance(result, tuple | list) and result and isinstance(result[0], Mapping):
            result = result[0]
        if not isinstance(result, Mapping):
            several = result if isinstance(result, tuple | list) else (result,)
            result = dict(zip(call.outputs, several, strict=False))
        for part, where in call.outputs.items():
            if part not in result:
                raise KernelResultError(f"returned nothing for {part}")
            _assign(call, where, result[part])


def _not_taken(parts: Sequence[str], operation: str, wanted: Sequence[str], makes_scales: bool) -> str:
    """Arguments of which a kernel needs one to see some part of a content, and takes none; empty if it sees them all.

    New scales are arguments of a `write` or `scatter` as well, but where the kernel makes them itself.
    """
    for part in parts:
        scale = part.endswith("_scale")
        needed = [[f"{part}_cache", f"{part}_caches", "buffer", *([] if scale else ["kv_cache"])]]
        if operation in ("write", "scatter") and not (makes_scales and scale):
            needed.append([part, "values"])
        for names in needed:
            if not set(names) & set(wanted):
                return " or ".join(names)
    return ""


def _check_contents(name: str, supports: Supports, wanted: Sequence[str]) -> None:
    """Refuses a content that the kernel declares and of which it takes no argument for some part."""
    if supports.operation in (*CHUNKED, "attention"):
        return
    makes_scales = supports.operation == "write" and "own scales" not in supports.lacks
    for content in supports.contents:
        if missing := _not_taken(CONTENTS[content], supports.operation, wanted, makes_scales):
            expected = f"a kernel that takes {missing}; {name} takes {', '.join(wanted)}"
            raise ConfigError("contents", content, expected)


def _is_changed(name: str, operation: str) -> bool:
    if operation in ("pack", "unpack"):
        return name == ("objects" if operation == "pack" else "tensors")
    return name == "buffer" or name.endswith(("_cache", "_caches"))


def _assign(call: Call, where: Any, array: Any) -> None:
    if isinstance(where, list):
        for one, content in zip(where, array, strict=True):
            _assign(call, one, content)
        return
    found = np.asarray(array.detach().cpu().view(_words(array)) if hasattr(array, "detach") else array)
    target = view(call.memory.array, where)
    if found.size != target.size or found.dtype.itemsize != target.dtype.itemsize:
        expected = f"{target.dtype} of shape {list(target.shape)}"
        raise KernelResultError(f"returned {found.dtype} of shape {list(found.shape)}: expected {expected}")
    bits = np.dtype(f"u{target.dtype.itemsize}")
    target.view(bits)[...] = np.ascontiguousarray(found).view(bits).reshape(target.shape)


def _words(tensor: Any) -> Any:
    """Integers as wide as a tensor's elements, which NumPy has for every type."""
    torch = importlib.import_module("torch")
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def arranged(found: StridedView, axes: str) -> StridedView:
    """A cache `[..., rows, heads, slots, elements]` with its axes as letters say; Unavailable where it cannot be so."""
    lead = len(found.shape) - 4
    sizes = dict(zip("BHND", zip(found.shape[lead:], found.strides[lead:], strict=True), strict=True))
    (rows, row), (slots, slot) = sizes["B"], sizes["N"]
    if "S" in axes:
        if rows > 1 and slots > 1 and row != slots * slot:
            raise Unavailable("slots that are not one axis")
        sizes["S"] = (rows * slots, slot if slots > 1 else row)
    if "H" not in axes and sizes["H"][0] > 1:
        raise Unavailable("several heads")
    order = [*zip(found.shape[:lead], found.strides[:lead], strict=True), *(sizes[letter] for letter in axes)]
    shape, strides = zip(*order, strict=True)
    return StridedView(shape, strides, found.offset, found.dtype)


def _converted(value: Any, array: Callable[[StridedView], Any]) -> Any:
    if isinstance(value, StridedView):
        return array(value)
    if isinstance(value, list):
        return [_converted(one, array) for one in value]
    if isinstance(value, Mapping):
        return {name: _converted(one, array) for name, one in value.items()}
    return value.made() if isinstance(value, Deferred) else value


class _NumpyArrays:
    def __init__(self, memory: np.ndarray, device: str) -> None:
        del device
        self._memory = memory

    def array(self, found: StridedView) -> Any:
        return view(self._memory, found)

    def finish(self) -> None:
        pass


class _JaxArrays(_NumpyArrays):
    def array(self, found: StridedView) -> Any:
        return importlib.import_module("jax.numpy").asarray(view(self._memory, found).copy())


class _TorchArrays(_NumpyArrays):
    """Tensors that share the memory, or its copy on a device, which is copied back."""

    def __init__(self, memory: np.ndarray, device: str) -> None:
        self._own = torch_views.from_buffer(memory)
        self._buffer = self._own.to(device) if device else self._own

    def array(self, found: StridedView) -> Any:
        return torch_views.view(self._buffer, found)

    def finish(self) -> None:
        if self._buffer is not self._own:
            self._own.copy_(self._buffer)


_ARRAYS: Mapping[str, type[_NumpyArrays]] = {"numpy": _NumpyArrays, "torch": _TorchArrays, "jax": _JaxArrays}


def target_of(
    target: str | Callable[..., Any], operation: str = "", device: str = "", seconds: float = PATIENCE, **options: Any
) -> Target:
    """A kernel by name, or a function, with what it supports.

    Args:
      target: `MODULE:FUNCTION` or `FILE.py:FUNCTION`, `LIBRARY.so:SYMBOL`, or a function.
      operation: one of `OPERATIONS`; empty for what the function declares.
      device: of torch tensors, such as `cuda`; empty for the CPU.
      seconds: time that a call of a C function may take.
      options: fields of `Supports` that replace those that the function declares.

    Raises:
      ConfigError: there is no such function, no operation is known, or a parameter has a name that means nothing.
    """
    function: Callable[..., Any] | None = None
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    worker = None
    if isinstance(target, str):
        if is_library(split_name("TARGET", target)[0]):
            worker = Worker(target, seconds)
        else:
            function = python_function("TARGET", target, "which a kernel is")
    else:
        function = target
    declared: Supports = getattr(function, DECLARED, Supports())
    changes = {field: value for field, value in options.items() if value not in (None, (), "")}
    if operation:
        changes["operation"] = operation
    supports = dataclasses.replace(declared, **changes)
    if not supports.operation:
        raise ConfigError("operation", "", f"one of {', '.join(OPERATIONS)}, as {name} does not declare any")
    if worker is not None:
        wanted = supports.arguments or DEFAULT_ARGUMENTS[supports.operation]
        _check_names(name, wanted)
        made = Target(name, supports, wanted, worker=worker)
    else:
        assert function is not None
        made = _python(name, function, supports, device)
    _check_contents(name, made.supports, made.wanted)
    return made


DEFAULT_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "write": ("key", "value", "key_cache", "value_cache", "slot_mapping"),
    "gather": ("key_cache", "value_cache", "kernel_block_table", "key_out", "value_out"),
    "scatter": ("key", "value", "key_cache", "value_cache", "kernel_block_table"),
    "copy_blocks": ("key_caches", "value_caches", "block_mapping", "kernel_blocks"),
    "zero": ("key_caches", "value_caches", "block_ids", "kernel_blocks"),
    "pack": ("tensors", "objects", "block_ids", "skip"),
    "unpack": ("tensors", "objects", "block_ids", "skip"),
    "attention": (
        "query", "key_cache", "value_cache", "kernel_block_table", "cu_q_lens", "kv_lens", "scale", "window", "out",
    ),
}  # fmt: skip
"""Arguments of C functions, in order, where none are named."""


def _python(name: str, function: Callable[..., Any], supports: Supports, device: str) -> Target:
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    optional = frozenset(each.name for each in parameters if each.default is not each.empty)
    wanted = tuple(each.name for each in parameters if each.name in KNOWN or each.name not in optional)
    _check_names(name, wanted)
    if not supports.arrays:
        supports = dataclasses.replace(supports, arrays=_arrays_of(function))
    if supports.arrays not in _ARRAYS:
        raise ConfigError("arrays", supports.arrays, f"one of {', '.join(_ARRAYS)}")
    if supports.arrays != "numpy" and importlib.util.find_spec(supports.arrays) is None:
        raise MissingExtraError(supports.arrays, supports.arrays, f"to call {name}")
    if device and supports.arrays != "torch":
        raise ConfigError("device", device, f"none: {name} takes arrays of {supports.arrays}, not torch tensors")
    lacks = {*supports.lacks}
    if supports.arrays == "jax" or device:
        lacks.add("far blocks")
    quiets = supports.arrays == "jax" and importlib.import_module("jax").default_backend() == "cpu"
    if quiets and "NaN payloads" not in supports.has:  # by XLA's scatter, of all of an array
        lacks.add("NaN payloads")
    supports = dataclasses.replace(supports, lacks=tuple(sorted(lacks)))
    return Target(name, supports, wanted, optional, function, device=device)


def _check_names(name: str, wanted: Sequence[str]) -> None:
    for each in wanted:
        if each not in KNOWN:
            begun = sorted(other for other in KNOWN if other.startswith(each.rstrip("s")))
            near = begun[:3] or difflib.get_close_matches(each, sorted(KNOWN), n=3, cutoff=0.6)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            expected = f"a name that hkv check-kernel --list shows, or a default, which is then left alone{meant}"
            raise ConfigError(f"parameter of {name}", each, expected)


def _arrays_of(function: Callable[..., Any]) -> str:
    """Arrays of a function that does not say: of the first library of which its module imports something."""
    named = getattr(inspect.unwrap(function), "__globals__", {}).values()
    places = {getattr(each, "__name__" if inspect.ismodule(each) else "__module__", None) for each in named}
    roots = {place.partition(".")[0] for place in places if isinstance(place, str)}
    return next((arrays for arrays in ("torch", "jax") if arrays in roots), "numpy")


def not_asked_names(supports: Supports, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Names of all layouts, contents, types and features that a kernel does not say it takes."""
    for field, names in known.items():
        taken = getattr(supports, field)
        if field == "layouts":
            taken = supports.known_layouts(names)
        yield from (name for name in names if taken and name not in taken)
    yield from (name for name in FEATURES if name in supports.lacks or (name in UNASKED and name not in supports.has))
