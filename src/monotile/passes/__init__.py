"""Rewrites and analyses shared by the backends. pipeline.py names them in order."""
