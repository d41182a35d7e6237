"""`monotile bench --backend nvidia`.

rows.py lists the rows, run.py checks and times them, device.py holds every CUDA call, peers.py the torch variants.
"""
