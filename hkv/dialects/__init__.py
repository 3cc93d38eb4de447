"""Policies: whose rules a cache follows. One folder a dialect; none imports another; `hkv.state` names none."""
