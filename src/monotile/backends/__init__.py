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
    """Return a backend by name. "cpu:avx2" is the cpu backend for another vector unit than this machine's own."""
    family, _, unit = name.partition(":")
    if family not in MODULES or (unit and family != "cpu"):
        raise UnknownBackend(f"there is no backend {name!r}; monotile has {', '.join(MODULES)}")
    module = import_module(MODULES[family], __package__)
    backend: Backend = module.for_unit(unit) if unit else module.BACKEND
    return backend


def usable(name: str) -> Backend:
    """The backend, or an error that says why it cannot run here."""
    backend = get(name)
    reason = backend.why_not()
    if reason is not None:
        raise UnknownBackend(f"backend {name!r} cannot run here: {reason}")
    return backend
