"""Stand-ins with which vLLM's model classes are built where there is no GPU.

Modules without content take the place of compiled extensions and of packages that need CUDA to be imported. Nothing of
theirs runs while a model is built on the meta device: the names are bound, stored in layers and never called, or called
and their answer never used. Each changes how a model is built, not what it caches.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm._deepselect_C",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.third_party.deep_gemm",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Extensions of vLLM's wheel, and a package in it, that are linked against CUDA's libraries."""

PACKAGES = (
    "compressed_tensors",
    "cuda",
    "cutlass",
    "flash_attn",
    "flashinfer",
    "quack",
    "tilelang",
    "torchaudio",
    "torchvision",
    "tvm",
)
"""Packages that vLLM's model files import at module level, absent in an environment for a CPU."""


class Anything:
    """Any function, class, decorator or number of an absent package: callable, subscriptable, a base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type[Anything]:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A decorator gives back what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, item: Any) -> Anything:
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __index__(self) -> int:
        return 0

    def __lt__(self, other: Any) -> bool:
        return False

    def __gt__(self, other: Any) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        # A fresh class each, so that a class with several such bases has them in a valid order.
        return (type("Anything", (Anything,), {}),)

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class EmptyModule(types.ModuleType):
    """A module that has every name, and every module below it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an `EmptyModule` under each of some names and all below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(name + ".") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Puts the stand-ins on the import path: of the extensions always, of a package where it is absent."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, StandIns((*EXTENSIONS, *absent)))
