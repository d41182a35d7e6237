"""Kernels in the tile language, one source each for every backend."""
