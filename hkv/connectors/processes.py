"""Connectors' functions by name, called in a process of their own, which may die of what they do, or never answer.

A function in C is called by the structures of `connector.h`; one of Python as it is. The process is told of a memory
once, and then asked for a layer and a block at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from hkv.connectors.memory import Memory
from hkv.errors import ConfigError, HKVError
from hkv.foreign import is_library, library_function, python_function, split_name
from hkv.processes import PATIENCE, Child, ProcessDied

Function = Callable[[Memory, int, int], Iterable[tuple[int, int, int]]]
"""Takes the memory and a layer and a block by index; returns buffer, first byte and number of bytes of each range."""

PURPOSE = "taking a memory, a layer and a block, and returning ranges of bytes"


class FunctionFailed(Exception):  # noqa: N818
    """Failure of a call in words: the function raised something."""


class FunctionProcess(Child):
    """A process that calls one function.

    Args:
      name: `MODULE:FUNCTION`, `FILE.py:FUNCTION` or `LIBRARY.so:FUNCTION`.
      seconds: time that a call may take.

    Raises:
      HKVError: there is no such function.
    """

    def __init__(self, name: str, seconds: float = PATIENCE) -> None:
        super().__init__(_serve, name)
        self._seconds = seconds
        self._told: Memory | None = None
        try:
            self.heard(PATIENCE)  # the start of an interpreter is no part of a call
        except ProcessDied as error:
            raise ConfigError("connector", name, f"a function that can be loaded: its process {error}") from None

    def __call__(self, memory: Memory, layer: int, block: int) -> list[Any]:
        """Ranges of a block.

        Raises:
          HKVError, NotImplementedError: the function raised it.
          FunctionFailed: the function raised something else.
          ProcessDied: as it says.
        """
        question = (None if memory is self._told else memory, layer, block)
        self._told = memory
        return self.ask(question, self._seconds)


def _serve(pipe: Any, name: str) -> None:
    """Answers until the pipe is closed."""
    try:
        library = is_library(split_name("connector", name)[0])
        function = _of_library(name) if library else python_function("connector", name, PURPOSE)
    except HKVError as error:
        return pipe.send(error)
    pipe.send(None)
    memory: Any = None
    while True:
        told, layer, block = pipe.recv()
        memory = memory if told is None else told
        try:
            pipe.send(list(function(memory, layer, block)))
        except (HKVError, NotImplementedError) as error:
            pipe.send(error)
        except Exception as error:  # its class may be the function's own, which the asking process cannot load
            pipe.send(FunctionFailed(f"raised {type(error).__name__}: {error}"))


class _CTensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("axes", ctypes.c_char_p),
        ("buffer", ctypes.c_int32),
        ("item_bytes", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("strides", ctypes.POINTER(ctypes.c_uint64)),
        ("rows_per_block", ctypes.c_uint64),
        ("row_step", ctypes.c_uint64),
    )


class _CLayer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("group", ctypes.c_int32),
        ("num_tensors", ctypes.c_int32),
        ("page_bytes", ctypes.c_uint64),
        ("tensors", ctypes.POINTER(_CTensor)),
    )


class _CGroup(ctypes.Structure):
    _fields_ = (("block_tokens", ctypes.c_uint64), ("num_blocks", ctypes.c_uint64))


class _CMemory(ctypes.Structure):
    _fields_ = (
        ("engine", ctypes.c_char_p),
        ("num_buffers", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("buffer_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("groups", ctypes.POINTER(_CGroup)),
        ("layers", ctypes.POINTER(_CLayer)),
    )


class _CRange(ctypes.Structure):
    _fields_ = (("buffer", ctypes.c_int32), ("first", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


MOST_RANGES = 1 << 16
"""Ranges of one block that a C function has room for."""


def _of_library(name: str) -> Function:
    """The function in a shared library, by the structures of `connector.h`."""
    function = library_function("connector", name)
    function.restype = ctypes.c_int64
    function.argtypes = (
        *(ctypes.POINTER(_CMemory), ctypes.c_int32, ctypes.c_uint64),
        *(ctypes.POINTER(_CRange), ctypes.c_int64),
    )
    room = (_CRange * MOST_RANGES)()
    made: dict[int, _CMemory] = {}

    def connector(memory: Memory, layer: int, block: int) -> list[tuple[int, int, int]]:
        if id(memory) not in made:
            made.clear()
            made[id(memory)] = _c_memory(memory)
        count = function(ctypes.byref(made[id(memory)]), layer, block, room, MOST_RANGES)
        if count < 0:
            raise NotImplementedError
        if count > MOST_RANGES:
            raise ConfigError("connector", count, f"at most {MOST_RANGES} ranges of a block")
        return [(each.buffer, each.first, each.bytes) for each in room[:count]]

    return connector


def _c_memory(memory: Memory) -> _CMemory:
    """The memory in C; ctypes keeps alive what its pointers lead to."""
    layers = []
    for layer in memory.layers:
        tensors = [
            _CTensor(
                *(tensor.name.encode(), tensor.dtype.encode(), tensor.axes.encode()),
                *(tensor.buffer, tensor.view.itemsize, len(tensor.shape), tensor.offset),
                *((ctypes.c_uint64 * len(values))(*values) for values in (tensor.shape, tensor.strides)),
                *(tensor.rows_per_block, tensor.row_step),
            )
            for tensor in layer.tensors
        ]
        array = (_CTensor * len(tensors))(*tensors)
        layers.append(_CLayer(layer.name.encode(), layer.group, len(tensors), layer.page_bytes, array))
    groups = [_CGroup(group.block_tokens, group.num_blocks) for group in memory.groups]
    return _CMemory(
        *(memory.engine.encode(), len(memory.buffers), len(groups), len(layers)),
        *((ctypes.c_uint64 * len(memory.buffers))(*memory.buffers), (_CGroup * len(groups))(*groups)),
        (_CLayer * len(layers))(*layers),
    )
