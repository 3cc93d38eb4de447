"""C functions under test, called in a process of their own, which may die of what they do.

The caller's memory is a file that both processes map. A call tells where the file is, and each argument as a view of it
or as a number. The answer is what the function returned; none within the time that a call may take, or a signal, is
the function's failure, and the next call starts another process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from hkv.errors import ConfigError
from hkv.foreign import library_function
from hkv.layout.strided import StridedView
from hkv.processes import PATIENCE, Child, ProcessDied
from hkv.testing.kernels.memory import guarded

CODES = {
    "int8": 0, "int16": 0, "int32": 0, "int64": 0, "uint8": 1, "uint16": 1, "uint32": 1, "uint64": 1, "float16": 2,
    "float32": 2, "float64": 2, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12, "float8_e8m0fnu": 14,
}  # fmt: skip
"""Type codes of DLPack 1.1."""


class DLTensor(ctypes.Structure):
    """`DLTensor` of `dlpack.h`; strides count elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Worker:
    """A process that calls one function of a shared library.

    Args:
      name: `LIBRARY.so:SYMBOL`.
      seconds: time that a call may take, beside the start of the process.

    Raises:
      ConfigError: there is no such library or symbol.
    """

    def __init__(self, name: str, seconds: float = PATIENCE) -> None:
        self._name, self._seconds = name, seconds
        try:
            self._child = self._started()
        except ProcessDied as error:
            raise ConfigError("TARGET", name, f"a library with that function: {error}") from None

    def call(self, memory: Any, arguments: list[Any]) -> None:
        """Calls the function on a memory; Unavailable where it returns anything but 0, ProcessDied as it says."""
        from hkv.testing.kernels.cases import Unavailable

        if self._child.over:
            self._child = self._started()
        file = f"/proc/{os.getpid()}/fd/{memory.file}"
        if status := self._child.ask((file, memory.size, memory.guards, arguments), self._seconds):
            raise Unavailable(f"the function returned {status}")

    def __del__(self) -> None:
        if hasattr(self, "_child"):
            self._child.close()

    def _started(self) -> Child:
        child = Child(_serve, self._name, daemon=True)
        child.heard(PATIENCE)  # the start of an interpreter is no part of a call
        return child


def _serve(pipe: Any, name: str) -> None:
    """Answers until the pipe is closed."""
    try:
        function = library_function("TARGET", name)
    except ConfigError as error:
        return pipe.send(error)
    pipe.send(None)
    while True:
        try:
            pipe.send(_perform(function, *pipe.recv()))
        except ConfigError as error:
            pipe.send(error)


def _perform(function: Any, file: str, size: int, guards: tuple[int, ...], arguments: list[Any]) -> int:
    descriptor = os.open(file, os.O_RDWR)
    try:
        with mmap.mmap(descriptor, size) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            kept: list[Any] = []
            base = ctypes.addressof(anchor)
            try:
                given = [_argument(base, value, kept) for value in arguments]
                with guarded(base, guards):
                    return int(function(*given))
            finally:
                del anchor  # a memory that something points to cannot be closed
    finally:
        os.close(descriptor)


def _argument(base: int, value: Any, kept: list[Any]) -> Any:
    """One argument; `kept` holds what it points to."""
    if isinstance(value, list):
        pointers = (ctypes.POINTER(DLTensor) * len(value))(*(_argument(base, one, kept) for one in value))
        kept.append(pointers)
        return pointers
    if isinstance(value, StridedView):
        rank, item = len(value.shape), value.itemsize
        shape = (ctypes.c_int64 * rank)(*value.shape)
        strides = (ctypes.c_int64 * rank)(*(stride // item for stride in value.strides))
        tensor = DLTensor(base + value.offset, 1, 0, rank, CODES[value.dtype], 8 * item, 1, shape, strides, 0)
        kept += [shape, strides, tensor]
        return ctypes.pointer(tensor)
    if type(value) is float:
        return ctypes.c_double(value)
    if value is None or type(value) is int:
        return ctypes.c_int64(value or 0)
    raise ConfigError("arguments", type(value).__name__, "arrays and numbers: a C function can take nothing else")
