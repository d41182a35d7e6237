"""`monotile emit`: kernels as files, with a manifest by which programs that know nothing of monotile launch them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__, backends
from ..backends.manifest import MEANINGS
from ..kernels import attention
from ..kernels.scores import Options
from ..launch.kernel import Kernel
from . import swift_package
from .chains import EmittedKernel, chains
from .contracts import contract
from .inspection import check_device, specialised
from .request import BadRequest, Request

FORMAT = 2  # of the manifest; grows when a reader of the old one would go wrong
MANIFEST = "manifest.json"
Item = TypeVar("Item")


def write(
    target: str,
    kernels: Sequence[Kernel],
    request: Request,
    folder: Path,
    device: str | None = None,
    *,
    package: str | None = None,
) -> list[Path]:
    """Write the kernels' files, the manifest and the package, if one is asked for, and return their paths."""
    files, manifest = emit(target, kernels, request, device, package=package)
    files[MANIFEST] = (json.dumps(manifest, indent=2) + "\n").encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    except OSError as error:
        raise BadRequest(f"cannot write to {folder}: {error.strerror}; name another folder with --out") from None
    return [folder / name for name in files]


def emit(
    target: str,
    kernels: Sequence[Kernel],
    request: Request,
    device: str | None = None,
    *,
    package: str | None = None,
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files by name, and the manifest."""
    if package is not None and (package, target) != ("swift", "metal"):
        raise BadRequest(f"--with {package} is not known for {target}; --target metal has --with swift")
    backend = backends.get(target)
    if device is not None:
        device = check_device(target, device)
    _check_names(kernels, request)
    files: dict[str, bytes] = {}
    parts: list[EmittedKernel] = []
    for kernel in sorted(kernels, key=lambda k: k is not attention.attention):  # whose sizes the others take
        form, choice = specialised(kernel, _part(kernel, request), target, device, alone=True)
        if kernel is attention.attention:
            request = _with_sizes(request, {tensor.name for tensor in form.tensors}, form.consts)
        made = backend.emit(form, choice.schedule, device)
        if files.keys() & made.files.keys():
            raise BadRequest(f"two kernels are named {kernel.name!r}; emit them into folders of their own")
        files |= made.files
        parts.append(EmittedKernel(kernel, form, {**made.entry, **contract(kernel, form)}))
    manifest = {"format": FORMAT, "monotile": __version__, "target": target, "meanings": MEANINGS}
    found = chains(parts)
    if package is not None:
        files |= swift_package.files(parts, found)
    return files, {**manifest, "kernels": [part.entry for part in parts], "chains": found}


def _with_sizes(request: Request, present: set[str], consts: Mapping[str, Any]) -> Request:
    """The request with what attention decides for kernels beside it: the blocks of the block map that it reads, and the
    columns of the states that it writes."""
    sizes = {"Dv": consts["Dv"]} if "split_o" in present else {}
    if "block_map" in present:
        sizes |= {"BQ": consts["BR"], "BK": consts["BK"], "covered": consts["covered"]}
    for name, size in sizes.items():
        if request.values.get(name, size) != size:
            found = f"--{name}={request.values[name]} does not fit: attention reads a block map of {name}={size}"
            raise BadRequest(f"{found}; leave it out, or emit mask_blocks into a folder of its own")
    return replace(request, values={**request.values, **sizes})


def _names(kernel: Kernel) -> set[str]:
    """The names of a kernel that a command line may give values for."""
    options = Options._fields if "options" in kernel.const_names else ()
    return {*kernel.const_names, *(p.name for p in kernel.parameters), *options}


def _part(kernel: Kernel, request: Request) -> Request:
    """The part of a request that concerns this kernel, of several."""
    known = _names(kernel) | {""}

    def known_to(items: Mapping[str, Item]) -> dict[str, Item]:
        return {name: item for name, item in items.items() if name in known}

    return Request(known_to(request.values), known_to(request.shapes), known_to(request.dtypes))


def _check_names(kernels: Sequence[Kernel], request: Request) -> None:
    known = set[str]().union(*(_names(kernel) for kernel in kernels))
    for name in (*request.values, *request.shapes, *filter(None, request.dtypes)):
        if name not in known:
            listing = ", ".join(kernel.name for kernel in kernels)
            raise BadRequest(f"nothing in {listing} is called {name!r}; known are {', '.join(sorted(known))}")
