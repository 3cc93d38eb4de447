"""The cache inside `jit`, for serving: state, arrivals, whole steps, slots, checkpoints."""
