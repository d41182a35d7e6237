"""Backends by name, loaded when first asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from ..errors import ArgumentDevice, UnknownBackend
from .base import Backend

MODULES = {"cpu": ".cpu.backend", "nvidia": ".nvidia.backend", "metal": ".metal.backend", "interpreter": ".interpreter"}

HOMES = {"cuda": "nvidia", "sm": "nvidia", "mps": "metal", "mlx": "metal"}


def home(device: str) -> str:
    """The backend for arrays on a device ("cuda:0", "mps") or for a described one ("sm_90"), if none is named."""
    return HOMES.get(device.partition(":")[0].partition("_")[0], "cpu")


def resolve(name: Any, device: str) -> str:
    """The backend that the caller names, or that of the device if the name is None."""
    if name is None:
        return home(device)
    if not isinstance(name, str):
        raise UnknownBackend(f"a backend is chosen by name, found {type(name).__name__}; pass backend='cpu'")
    return name


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
    """The backend, if it can run here, else an error that says why it cannot."""
    backend = get(name)
    reason = backend.why_not()
    if reason is not None:
        raise UnknownBackend(f"backend {name!r} cannot run here: {reason}")
    return backend


def for_device(name: str | None, device: str) -> Backend:
    """Return the named backend, or the one at home on the arrays' device; raise an error if it cannot use those."""
    chosen = usable(resolve(name, device))
    if not chosen.accepts(device):
        cures = {"mlx": "pass numpy.array(x)", "cpu": "move them with .cuda()"}
        cure = cures.get(device, "move them with .cpu()")
        raise ArgumentDevice(f"backend {chosen.name!r} cannot use arrays on {device!r}; {cure}")
    return chosen
