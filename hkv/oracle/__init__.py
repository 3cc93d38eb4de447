"""Engines of hybrid KV caches driven, compared, diagnosed and explained, whichever dialect's they are. Internal.

`import hkv` offers what is public of it: `check`, `diff`, `record`, `explain` (`hkv.oracle.verbs`).
"""
