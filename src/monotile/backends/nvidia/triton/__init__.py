"""A kernel as a plain Triton module."""
