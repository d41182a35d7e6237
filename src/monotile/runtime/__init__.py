"""What calls and backends need of the host: array descriptions, the disk cache, the machine's name.

The package imports this before anything else: source files changed after this moment are not what runs (cache.py)."""

from time import time_ns

LOADING_SINCE_NS = time_ns()
