"""The form of SGLang's rules that is written for XLA, of which the compiled schedule of replays is made."""

from __future__ import annotations

from hkv.dialects.sglang.config import SGLangConfig
from hkv.dialects.sglang.rules import execute
from hkv.dialects.sglang.rules.operations import ALL
from hkv.dialects.sglang.rules.parameters import SGLangParameters, of_config
from hkv.machine.operations import Programs, bucket
from hkv.state.radix import RadixBuckets, RadixState, empty_radix


def init(config: SGLangConfig, buckets: RadixBuckets) -> tuple[SGLangParameters, RadixState]:
    """An empty cache, as NumPy arrays.

    Args:
      config: the configuration, which becomes data.
      buckets: the static sizes; see `buckets_for`.

    Raises:
      ConfigError: it does not fit the buckets.
    """
    return of_config(config), empty_radix(buckets, pages_of_pools(config))


def pages_of_pools(config: SGLangConfig) -> tuple[int, ...]:
    """Pages of the full pool, of the window's, and states; 0 for what there is not."""
    full, window = (*config.num_slots, 0)[:2]
    return full // config.page_size, window // config.page_size, config.states or 0


def buckets_for(config: SGLangConfig, *, tokens: int, requests: int = 16, keys: int = 4096) -> RadixBuckets:
    """Static sizes that a configuration fits, rounded up so that few executables serve many configurations.

    Args:
      config: the configuration.
      tokens: longest request.
      requests: requests at the same time.
      keys: distinct keys.
    """
    return RadixBuckets(
        pages=bucket(max(pages_of_pools(config)) + 1, 64),
        keys=bucket(keys, 1024),
        requests=bucket(requests, 4),
        row=bucket(-(-tokens // config.page_size) + 1, 256),
    )


pure = Programs(execute.execute, only=ALL).pure
