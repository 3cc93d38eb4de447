"""A dialect with two pools: a radix cache of full attention and a window, each with blocks of its own."""
