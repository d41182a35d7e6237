"""When this process began to load monotile. Imported before anything else: source files changed after this moment are
not what runs (see cache.py)."""

from time import time_ns

SINCE_NS = time_ns()
