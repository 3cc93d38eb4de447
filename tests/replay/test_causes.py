"""Causes of misses against what proves them, both engines' rules: a few draws of `benchmarks/causes.py`."""

import collections

from benchmarks import causes
from hkv.replay.attribution import NOT_COMPUTED
from hkv.replay.reasons import EVICTED, NOT_RETAINED


def test_causes_are_what_replays_with_something_changed_find():
    seen = collections.Counter()
    for seed in range(2 * len(causes.CACHES)):
        seen.update(causes.check(seed))
    wanted = {EVICTED, NOT_RETAINED, NOT_COMPUTED, "it loses nowhere", "orders compared", "advice compared"}
    assert wanted <= {name for name, count in seen.items() if count}, seen
