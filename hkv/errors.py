"""The errors that host calls raise: each names the argument, the value it had, and what was expected."""

from __future__ import annotations

from typing import Any


class HKVError(ValueError):
    """Base of every error HKV raises about its input.

    Args:
      argument: name of the offending argument, field or option, as the caller knows it.
      value: its value.
      expected: values that would have been accepted, in words.
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument = argument
        self.value = value
        self.expected = expected
        super().__init__(f"{argument} = {_shorten(value)}: expected {expected}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets it as it is: what `__init__` makes of its arguments is made already."""
        return BaseException.__new__, (type(self), *self.args), vars(self)


class SpecError(HKVError):
    """A description of what one layer caches is impossible."""


class TopologyError(HKVError):
    """Layers, groups and pools do not fit together."""


class ConfigError(HKVError):
    """A cache configuration breaks one of its dialect's rules."""


class LayoutError(HKVError):
    """Bytes cannot be laid out, viewed or addressed as asked."""


class PlanError(HKVError):
    """A model does not fit: no grouping, page size or block count satisfies the request."""


class OperationError(HKVError):
    """An operation does not apply to the state it was given; nothing was changed."""


class EngineFailure(HKVError):  # noqa: N818
    """A defect that was asked for by name ends as it does upstream: the engine fails halfway, its state is lost."""


class UnsupportedConfigError(ConfigError):
    """An engine does not implement a configuration, and says so: no difference, and nothing was checked."""


class EngineProcessError(HKVError):
    """An engine in a process of its own cannot start, died, hung, or did not keep to the process protocol."""


class EngineTimeoutError(EngineProcessError):
    """An engine in a process of its own was silent for longer than it may be."""


class MissingExtraError(HKVError):
    """An optional package is not installed.

    It has an import name; `hkv[extra]` brings it, and the purpose is the use it is wanted for.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__("package", package, f"it to be installed, {purpose}: pip install 'hkv[{extra}]'")


class MissingEngineError(HKVError):
    """An engine that HKV is compared with is not installed; no extra of HKV brings it.

    `how` is the way to make an environment that has it, in words.
    """

    def __init__(self, package: str, purpose: str, how: str) -> None:
        self.package = package
        super().__init__("package", package, f"it to be installed, {purpose}; {how} makes an environment that has it")


class FileError(HKVError):
    """A file cannot be used.

    The path is as the caller named it, the line counts from 1, None for the whole file; no field for the whole line.
    """

    def __init__(self, path: str, line: int | None, field: str, value: object, expected: str) -> None:
        self.path = path
        self.line = line
        self.field = field
        where = path if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {field}" if field else where, value, expected)


def _shorten(value: object, limit: int = 120) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a value nested too deeply to be shown"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
