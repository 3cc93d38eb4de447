"""Work by the machines of a Ray cluster: points of a sweep, stretches of a comparison's seeds."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hkv.errors import ConfigError, HKVError, MissingExtraError
from hkv.machine import native_loops

CONNECTING = 10.0
"""Seconds within which a cluster has to answer."""

Item = TypeVar("Item")
Shared = TypeVar("Shared")
Found = TypeVar("Found")


def in_cluster(
    work: Callable[[Item, Shared], Found], items: Sequence[Item], shared: Shared, address: str
) -> Iterator[tuple[int, Found]]:
    """Has work done on items by a Ray cluster, one processor each. Yields an item's place and what was found.

    The machines need HKV as it is here; a file is read where the work is done, so that a path is a path there.
    The address is as `ray.init` takes it: `auto`, `local`, `HOST:PORT`, `ray://HOST:PORT`.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "ray", "work on several machines") from None
    _check(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise ConfigError("ray", address, f"the address of a Ray cluster ({str(error).splitlines()[0]})") from None
    try:
        remote, kept = ray.remote(num_cpus=1, max_retries=2)(_done), ray.put(shared)
        waiting = {remote.remote(work, item, kept): place for place, item in enumerate(items)}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            place = waiting.pop(ready)
            try:
                found = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, HKVError) else error from None
            yield place, found
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Makes sure that somebody listens at `HOST:PORT`: Ray itself tries for minutes."""
    place = re.fullmatch(r"(?:ray://)?([^:/]+):([0-9]{1,5})", address)
    if place is None:
        return
    try:
        socket.create_connection((place[1], int(place[2])), CONNECTING).close()
    except (OSError, OverflowError) as error:
        raise ConfigError("ray", address, f"the address of a Ray cluster ({error})") from None


def _done(work: Callable[[Item, Shared], Found], item: Item, shared: Shared) -> Found:
    native_loops.enable()
    return work(item, shared)
