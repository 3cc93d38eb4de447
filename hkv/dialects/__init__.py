"""Policies: whose rules a cache follows. One folder a dialect; none imports another, and none is named in `hkv.state`."""
