"""Caches on several devices: parallel shapes, sharding, and moving requests between meshes."""
