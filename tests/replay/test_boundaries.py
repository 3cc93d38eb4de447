"""Boundaries that one replay makes known to another while both go on."""

import threading

import numpy as np
import pytest

from hkv.errors import EngineFailure
from hkv.replay.reasons import Boundaries


def test_hits_become_known_in_order_and_final():
    found, taken_up = Boundaries(4), threading.Semaphore(0)

    def work():
        found.tell(np.array([16, 0, 99, 99]), 2)
        taken_up.acquire()
        found.tell(np.array([16, 0, 32, 99]), 3)
        taken_up.acquire()
        found.hits[:] = [16, 0, 32, 48]
        return "the replay"

    found.begin(work)
    assert found.known(lambda count: count > 0) == 2
    assert found.hits.tolist() == [16, 0, 0, 0]
    taken_up.release()
    assert found.known(lambda count: count > 2) == 3
    assert found.hits.tolist() == [16, 0, 32, 0]
    taken_up.release()
    assert found.known(lambda _: False) == 4, "all are known once it ended, however many it told"
    assert found.found() == "the replay"


def test_a_replay_that_fails_fails_where_somebody_waits():
    found = Boundaries(4)

    def work():
        found.tell(np.zeros(4, int), 1)
        raise EngineFailure("operation", "refused", "one that is not")

    found.begin(work)
    for wait in (lambda: found.known(lambda count: count > 1), found.found):
        with pytest.raises(EngineFailure, match="refused"):
            wait()
