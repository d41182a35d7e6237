"""`monotile bench`: rows.py says what is timed, worker.py times it, limits.py what the machine can do at best."""

from .report import WorkerFailed, run, show

__all__ = ["WorkerFailed", "run", "show"]
