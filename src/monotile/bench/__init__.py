"""`monotile bench`, `monotile snap` and `monotile diff`.

suite.py lists the rows, worker.py checks and times them, limits.py measures what the machine can do at best, report.py
collects the JSON, goals.py holds the goals, baselines.py keeps and compares reports. table.py and html.py show them;
entries.py reduces them to what pictures need. nvidia/ does the same on a GPU.
"""

from .nvidia.peers import Flex
from .nvidia.run import RunOptions
from .nvidia.run import run as run_nvidia
from .report import WorkerFailed, run
from .table import show

__all__ = ["Flex", "RunOptions", "WorkerFailed", "run", "run_nvidia", "show"]
