"""Where a cache's bytes lie: orders, strides, content, resolution, page pools, views and pictures."""
