"""Request traces: reading them, giving their prefixes keys, and generating new ones."""
