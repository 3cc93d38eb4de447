"""Placement of a cache's bytes: orders, strides, content, resolution, page pools, views and pictures."""
