"""`monotile bench --backend nvidia`: rows.py says what is timed, run.py checks and times it, device.py holds the calls
of CUDA, peers.py asks torch for the same work."""
