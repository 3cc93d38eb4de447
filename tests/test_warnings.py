"""Warnings of code that is not HKV's: where filters make errors of warnings, an engine may warn as it likes."""

from __future__ import annotations

import functools
import pathlib
import warnings
from typing import Any

import jax
import pytest
from jax._src import compilation_cache

from hkv.contract.answer import Failure, attempt_with
from hkv.foreign import own_warnings, python_function


def warn(module: str, kind: type[Warning] = DeprecationWarning) -> str:
    warnings.warn_explicit("old", kind, f"{module}.py", 1, module=module)
    return "answered"


def test_an_engine_that_warns_has_answered() -> None:
    """A deprecation in torch is no answer, and no difference."""

    class Asked:
        pass

    def perform(engine: Any, operation: Any) -> Any:
        warn("torch.jit")

    with pytest.warns(DeprecationWarning, match="old"):
        assert attempt_with(perform, None, Asked()) is None


@pytest.mark.parametrize("module", ["hkv.oracle.check", "reference.state", "hkv", "pallas_kernels.move"])
def test_warnings_of_hkv_stay_errors(module: str) -> None:
    with own_warnings(), pytest.raises(DeprecationWarning):
        warn(module)
    failure = attempt_with(lambda engine, operation: warn(module), None, None)
    assert isinstance(failure, Failure)


def test_a_module_that_warns_as_it_is_imported_is_imported(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "old_engine.py"
    path.write_text("import warnings\nwarnings.warn('old', DeprecationWarning)\ndef engine(header): return header\n")
    with pytest.warns(DeprecationWarning, match="old"):
        assert python_function("engine", f"{path}:engine", "taking a header")(3) == 3


def test_filters_of_others_are_left_alone() -> None:
    before = list(warnings.filters)
    with own_warnings(), pytest.warns(UserWarning, match="old"):
        assert warn("numpy", UserWarning) == "answered"
    assert warnings.filters == before
    with warnings.catch_warnings():
        warnings.resetwarnings()
        with own_warnings():
            assert not warnings.filters


def test_a_folder_of_programs_that_is_busy_costs_a_compilation_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX waits ten seconds for the folder's lock, which another test's process may hold."""
    asked = []

    def busy(name: str, *given: Any) -> Any:
        asked.append(name)
        raise TimeoutError(".lockfile")

    for name in ("get_executable_and_time", "put_executable_and_time"):
        monkeypatch.setattr(compilation_cache, name, functools.partial(busy, name))
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda backend: True)
    least = "jax_persistent_cache_min_compile_time_secs"
    seconds = jax.config.values[least]
    jax.config.update(least, 0.0)
    try:
        assert jax.jit(lambda x: x * 3)(4) == 12
    finally:
        jax.config.update(least, seconds)
    assert set(asked) == {"get_executable_and_time", "put_executable_and_time"}
