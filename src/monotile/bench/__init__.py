"""`monotile bench`: suite.py says what is timed, worker.py times it, limits.py what the machine can do at best;
`monotile snap` and `monotile diff`: baselines.py keeps and compares what was found; nvidia/ does the same on a GPU."""

from .nvidia.run import run as run_nvidia
from .report import WorkerFailed, run
from .table import show

__all__ = ["WorkerFailed", "run", "run_nvidia", "show"]
