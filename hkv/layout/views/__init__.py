"""The same bytes as arrays: one module for NumPy, one for JAX, one for PyTorch, each taking a `StridedView`."""
