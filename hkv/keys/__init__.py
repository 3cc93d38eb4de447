"""What a cached prefix is called, one scheme a module. Importing the package imports no JAX."""
