"""Keys of cached prefixes, one scheme per module. Importing the package imports no JAX."""
