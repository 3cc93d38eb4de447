"""C functions under test, called in a process of their own, which may die of what they do.

The caller's memory is a file that both processes map. A call is one line of JSON on a pipe: where the file is, and each
argument as offset, shape, strides and type, or as a number. The answer is what the function returned; none within
the time that a call may take, or a signal, is the function's failure, and the next call starts another process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pathlib
import subprocess
import sys
import time
from multiprocessing import connection
from typing import Any

from hkv.errors import ConfigError
from hkv.foreign import end_with_parent, ended, library_function
from hkv.testing.kernels.memory import guarded

PATIENCE = 60.0
"""Seconds that a call may take, unless a command says otherwise."""

MEMORY = 4 << 30
"""Bytes that a kernel's process may have: a case has kilobytes, or a pool of which next to nothing exists."""

GLANCE = 0.1
"""Seconds between two looks at what a process has."""

CODES = {
    "int8": 0, "int16": 0, "int32": 0, "int64": 0, "uint8": 1, "uint16": 1, "uint32": 1, "uint64": 1, "float16": 2,
    "float32": 2, "float64": 2, "bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12, "float8_e8m0fnu": 14,
}  # fmt: skip
"""Type codes of DLPack 1.1."""


class KernelDied(Exception):  # noqa: N818
    """The function ended its process, or did not return."""


class KernelHung(KernelDied):
    """The function did not return within so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not return within {seconds:g} s")


class KernelGrew(KernelDied):
    """The function took more than `MEMORY`."""

    def __init__(self) -> None:
        super().__init__(f"took more than {MEMORY >> 20} MiB of memory")


def ready_of(waited: list[Any], process: int, seconds: float) -> list[Any]:
    """Those of `waited` that can be read, within so many seconds of a case that a process performs.

    Raises:
      KernelHung: none can.
      KernelGrew: the process takes too much memory.
    """
    end = time.monotonic() + seconds
    while not (ready := connection.wait(waited, min(GLANCE, max(0.0, end - time.monotonic())))):
        if time.monotonic() >= end:
            raise KernelHung(seconds)
        if _resident(process) > MEMORY:
            raise KernelGrew
    return ready


def _resident(process: int) -> int:
    """Bytes of memory that a process has, as Linux tells it; else 0."""
    try:
        return int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


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
      library: path of the library.
      symbol: name of the function.
      seconds: time that a call may take, beside the start of the process.

    Raises:
      ConfigError: there is no such file or symbol.
    """

    def __init__(self, library: str, symbol: str, seconds: float = PATIENCE) -> None:
        path = pathlib.Path(library)
        if not path.is_file():
            raise ConfigError("TARGET", library, "a shared library that exists")
        self._library, self._symbol = str(path.absolute()), symbol
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except KernelDied as error:
            raise ConfigError("TARGET", f"{library}:{symbol}", f"a library with that function: {error}") from None

    def call(self, memory: Any, arguments: list[Any]) -> None:
        """Calls the function on a memory; Unavailable where it returns anything but 0, KernelDied as it says."""
        from hkv.testing.kernels.cases import Unavailable

        told = [_told(value) for value in arguments]
        place = {"file": f"/proc/{os.getpid()}/fd/{memory.file}", "size": memory.size, "guards": memory.guards}
        request = {**place, "arguments": told}
        if self._process is None:
            self._start()
        status = self._ask(request, self._seconds)["status"]
        if status:
            raise Unavailable(f"the function returned {status}")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._requests)
            os.close(self._answers)
            self._process = None

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        try:
            ready_of([self._answers], process.pid, seconds)
        except KernelDied:
            self.close()
            raise
        if answer := os.read(self._answers, 1 << 16):
            found = json.loads(answer)
            if "error" in found:
                raise KernelDied(found["error"])
            return found
        status = process.wait()
        self.close()
        raise KernelDied(ended(status))

    def _start(self) -> None:
        inward, self._requests = os.pipe()
        self._answers, outward = os.pipe()
        command = [sys.executable, "-m", __name__, self._library, self._symbol, str(inward), str(outward)]
        self._process = subprocess.Popen(command, pass_fds=(inward, outward), stdin=subprocess.DEVNULL)
        os.close(inward)
        os.close(outward)
        self._ask({}, PATIENCE)  # the start of an interpreter is no part of a call


def _told(value: Any) -> Any:
    if isinstance(value, list):
        return [_told(one) for one in value]
    if hasattr(value, "strides"):
        item = value.itemsize
        strides = [stride // item for stride in value.strides]
        return {"offset": value.offset, "shape": value.shape, "strides": strides, "dtype": value.dtype, "item": item}
    if value is None:
        return 0
    if type(value) in (int, float):
        return value
    raise ConfigError("arguments", type(value).__name__, "arrays and numbers: a C function can take nothing else")


def _serve(library: str, symbol: str, inward: int, outward: int) -> None:
    """Answers requests until the pipe is closed."""
    end_with_parent()
    error, function = "", None
    try:
        function = library_function("TARGET", f"{library}:{symbol}")
    except ConfigError as problem:
        error = str(problem)
    with os.fdopen(inward, "rb") as requests:
        for line in requests:
            request = json.loads(line)
            answer: dict[str, Any] = {"status": 0}
            if function is None:
                answer = {"error": error}
            elif request:
                answer["status"] = _perform(function, request)
            os.write(outward, json.dumps(answer).encode())


def _perform(function: Any, request: dict[str, Any]) -> int:
    descriptor = os.open(request["file"], os.O_RDWR)
    try:
        with mmap.mmap(descriptor, request["size"]) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            kept: list[Any] = []
            base = ctypes.addressof(anchor)
            arguments = [_argument(base, value, kept) for value in request["arguments"]]
            with guarded(base, request["guards"]):
                status = int(function(*arguments))
            del anchor
            return status
    finally:
        os.close(descriptor)


def _argument(base: int, value: Any, kept: list[Any]) -> Any:
    """One argument; `kept` holds what it points to."""
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, list):
        pointers = (ctypes.POINTER(DLTensor) * len(value))(*(_argument(base, one, kept) for one in value))
        kept.append(pointers)
        return pointers
    rank = len(value["shape"])
    shape, strides = ((ctypes.c_int64 * rank)(*value[name]) for name in ("shape", "strides"))
    tensor = DLTensor(
        base + value["offset"], 1, 0, rank, CODES[value["dtype"]], 8 * value["item"], 1, shape, strides, 0
    )
    kept += [shape, strides, tensor]
    return ctypes.pointer(tensor)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
