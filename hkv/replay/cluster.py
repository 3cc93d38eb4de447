"""Work on points of a sweep by the machines of a Ray cluster."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hkv.errors import ConfigError, HKVError, MissingExtraError
from hkv.machine import native_loops
from hkv.replay.points import Point
from hkv.replay.traces.interned import InternedTrace

CONNECTING = 10.0
"""Seconds within which a cluster has to answer."""

Found = TypeVar("Found")


def in_cluster(
    work: Callable[[Point, InternedTrace], Found], points: Sequence[Point], trace: InternedTrace, address: str
) -> Iterator[tuple[int, Found]]:
    """Has work done on points by a Ray cluster, one processor each. Yields a point's place and what was found.

    The machines need HKV as it is here; a model is read where it is replayed, so that a path is a path there.

    Args:
      work: a function of a module.
      points: the points.
      trace: the trace, which the cluster keeps once a machine.
      address: the cluster's, as `ray.init` takes it: `auto`, `local`, `HOST:PORT`, `ray://HOST:PORT`.

    Raises:
      MissingExtraError: Ray is not installed.
      ConfigError: there is no cluster at that address.
      HKVError: a point cannot be replayed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "ray", "sweeps on several machines") from None
    _check(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise ConfigError("ray", address, f"the address of a Ray cluster ({str(error).splitlines()[0]})") from None
    try:
        remote, kept = ray.remote(num_cpus=1, max_retries=2)(_done), ray.put(trace)
        waiting = {remote.remote(work, point, kept): place for place, point in enumerate(points)}
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


def _done(work: Callable[[Point, InternedTrace], Found], point: Point, trace: InternedTrace) -> Found:
    native_loops.enable()
    return work(point, trace)
