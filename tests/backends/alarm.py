"""A signal to this process after a while."""

from __future__ import annotations

import _thread
import signal
import threading

# Windows has neither SIGALRM nor timers of signals: there a thread sends what Ctrl-C sends.
SIGNAL = getattr(signal, "SIGALRM", signal.SIGINT)
_timers: list[threading.Timer] = []


def set_alarm(seconds: float) -> None:
    """Send SIGNAL after a time, in place of one that was set before; 0 sends none."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return
    while _timers:
        timer = _timers.pop()
        timer.cancel()
        timer.join()
    if seconds:
        _timers.append(threading.Timer(seconds, _thread.interrupt_main))
        _timers[0].start()
