"""Backends by name, loaded when first asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ..errors import UnknownBackend
from .base import Backend

MODULES = {"cpu": ".cpu.backend", "nvidia": ".nvidia.backend", "metal": ".metal.backend", "interpreter": ".interpreter"}

HOMES = {"cuda": "nvidia", "mps": "metal", "mlx": "metal"}


def home(device: str) -> str:
    """The backend that is used for arrays on this device, if the caller names none."""
    return HOMES.get(device.partition(":")[0], "cpu")


@cache
def get(name: str) -> Backend:
    if name not in MODULES:
        raise UnknownBackend(f"there is no backend {name!r}; monotile has {', '.join(MODULES)}")
    backend: Backend = import_module(MODULES[name], __package__).BACKEND
    return backend


def usable(name: str) -> Backend:
    """The backend, or an error that says why it cannot run here."""
    backend = get(name)
    reason = backend.why_not()
    if reason is not None:
        raise UnknownBackend(f"backend {name!r} cannot run here: {reason}")
    return backend
