"""A kernel as a Gluon module with producer and consumer warps."""
