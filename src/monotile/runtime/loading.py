"""The time at which this process began to load monotile. Imported before anything else: a source file that changed
later may not be what runs (see cache.py)."""

from time import time_ns

SINCE_NS = time_ns()
