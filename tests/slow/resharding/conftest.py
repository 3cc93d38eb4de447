"""The tests in `on_eight_devices` run in a process that has them: see `eight_devices.py`."""

from tests.slow.sharding.eight_devices import here

collect_ignore = [] if here() else ["on_eight_devices"]
