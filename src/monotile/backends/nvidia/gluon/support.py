"""Where Gluon modules can run: the Tritons whose Gluon the text was written for, and the architecture."""

from __future__ import annotations

from functools import cache
from importlib import metadata

VERSIONS = ("3.6", "3.7")  # Gluon changes from version to version
ARCHITECTURE = "sm_90"  # which has wgmma; later ones have other matrix instructions


@cache
def triton_version() -> str:
    """Return Triton's version; nothing where it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def version_supported() -> bool:
    """Return True if the text was written for this Triton's Gluon. Where Triton is not installed nothing runs, and what
    is shown is for a machine that has a supported one."""
    return not triton_version() or triton_version().startswith(tuple(f"{version}." for version in VERSIONS))


def why_unsupported(architecture: str) -> str:
    """Say why no Gluon module can run here; nothing where one can."""
    if not version_supported():
        written = f"The Gluon text was written for Triton {' and '.join(VERSIONS)}"
        return f"{written}, and this is Triton {triton_version()}; Gluon changes from version to version."
    if architecture != ARCHITECTURE:
        return f"The Gluon module uses Hopper's wgmma, which {architecture} does not have; it is for {ARCHITECTURE}."
    return ""
