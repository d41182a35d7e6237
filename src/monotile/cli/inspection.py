"""`monotile inspect`: the text of a kernel at one stage, or what a call of the library runs on a device, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .. import backends, dtypes
from ..backends.choices import AttentionChoice, Choice
from ..backends.cpu.target import UNITS
from ..backends.nvidia.device import DESCRIBED, gpu
from ..ir import Kernel as KernelIR
from ..launch.captures import compile_in
from ..launch.kernel import Kernel
from ..launch.signature import Parameter
from ..library import dry_run
from ..runtime.tensors import View, dense
from . import catalogue
from .request import BadRequest, Request

DEFAULT_LENGTH = 64
DEFAULT_DEVICE = {"nvidia": "sm_90"}  # that schedules were measured on


def backend_for(backend: str | None, device: str | None) -> str:
    """The backend that is named, or that of the device."""
    if backend is not None:
        return backend
    return backends.home(device) if device is not None else "cpu"


def check_device(backend: str, device: str | None) -> str | None:
    """The device to show, by default the one that schedules were measured on; an unknown one is an error."""
    if device is None or device == "cpu" == backend:
        return DEFAULT_DEVICE.get(backend)
    family = backend.partition(":")[0]
    if family == "nvidia" and device.startswith("cuda"):
        backends.usable(backend)
        return device
    known = {"nvidia": tuple(DESCRIBED), "metal": ("mps",), "cpu": tuple(UNITS)}.get(family, ())
    if device not in known:
        listing = ", ".join(known) or "none to choose from"
        more = " or 'cuda' for the GPU here" if family == "nvidia" else ""
        raise BadRequest(f"backend {backend!r} knows no device {device!r}; it has {listing}{more}")
    return device


def _architecture(device: str | None) -> str | None:
    """The name by which backends know a device: of a GPU that is here, its architecture."""
    return gpu(device).architecture if device is not None and device.startswith("cuda") else device


def text(place: str, stage: str, request: Request, backend: str, device: str | None = None) -> str:
    """The text of a kernel, or of every launch of a library function, at one stage of its compilation. The backend need
    not be able to run here."""
    if stage == "source" and place not in catalogue.FUNCTIONS:
        return source(catalogue.find_kernel(place))
    device = check_device(backend, device)
    launches = list(_launches(place, request, backend, device))
    if not launches:
        raise BadRequest(f"a call of {place} with these lengths launches nothing: its results have no elements")
    if stage == "source":
        return "\n".join(source(kernel) for kernel, *_ in launches)
    made_for = _architecture(device)
    stages = [backends.get(backend).stages(form, choice.schedule, made_for) for _, form, choice in launches]
    if not any(stage in found for found in stages):
        known = ", ".join(dict.fromkeys(name for found in stages for name in found))
        raise BadRequest(f"backend {backend!r} has no stage {stage!r}; it has source, {known}")
    if len(launches) == 1:
        return _made(stage, stages[0])
    texts = []
    for n, ((kernel, *_), found) in enumerate(zip(launches, stages, strict=True), 1):
        title = f"# launch {n} of {len(launches)}: {kernel.name}"
        has = stage in found
        texts.append(f"{title}\n{_made(stage, found)}" if has else f"{title} has {', '.join(found)}, not {stage}\n")
    return "\n".join(texts)


def explanation(place: str, request: Request, backend: str, device: str | None = None) -> str:
    """Which blocks, schedule and path are chosen for each launch, and why."""
    found, lines = backends.get(backend), []
    device = check_device(backend, device)
    launches = list(_launches(place, request, backend, device))
    count = f"{len(launches)} launch{'' if len(launches) == 1 else 'es'}"
    lines.append(f"{place} on {device or catalogue.device_of(backend, device)} ({backend}): {count}")
    for n, (kernel, form, choice) in enumerate(launches, 1):
        lines.append(f"{n}. kernel {kernel.name}")
        lines.append(f"   tensors: {', '.join(f'{t.name} {t.dtype}' for t in form.tensors)}")
        names = [name for name in kernel.const_names if name in form.consts and name != "options"]
        constants = ", ".join(f"{name}={form.consts[name]}" for name in names)
        lines.append(f"   constants: {constants}")
        if choice.why:
            lines.append(f"   choice: {choice.why}")
        if isinstance(choice, AttentionChoice):
            keys = choice.blocks_per_split * choice.key_block
            lines.append(f"   splits: {f'{choice.splits}, of {keys} keys' if choice.splits else 'none'}")
        lines += [f"   {line}" for line in found.explain(form, choice.schedule, _architecture(device))]
    return "\n".join(lines) + "\n"


def _launches(
    place: str, request: Request, backend: str, device: str | None
) -> Iterator[tuple[Kernel, KernelIR, Choice]]:
    """The launches of a library function, or a kernel that is found elsewhere."""
    if place in catalogue.FUNCTIONS:
        views, options = catalogue.described_call(place, request, backend, device)
        yield from dry_run.launches(place, views, options)
        return
    kernel = catalogue.find_kernel(place)
    yield kernel, *specialised(kernel, request, backend, device)


def _made(stage: str, stages: Mapping[str, Callable[[], str]]) -> str:
    try:
        return stages[stage]()
    except ModuleNotFoundError as error:
        raise BadRequest(f"the stage {stage!r} needs {error.name}; run: pip install {error.name}") from None


def source(kernel: Kernel) -> str:
    """The kernel's Python source with the line numbers of its file."""
    lines, first = inspect.getsourcelines(kernel.function)
    width = len(str(first + len(lines)))
    return "".join(f"{first + n:{width}}  {line.rstrip()}\n" for n, line in enumerate(lines))


# ---- arguments of kernels --------------------------------------------------------------------------------------------


def specialised(
    kernel: Kernel, request: Request, backend: str, device: str | None, *, alone: bool = False
) -> tuple[KernelIR, Choice]:
    """The kernel for arguments as the command line describes them, and the library's choice for it. `alone`: numbers
    that functions capture are compiled in, since nothing else would know them."""
    request, choice = catalogue.completed(kernel, request, backend, device)
    args, consts = arguments(kernel, request)
    if alone:
        compile_in(tuple(consts.values()))
    return kernel.ir(*args, **consts), choice


def arguments(kernel: Kernel, request: Request) -> tuple[list[Any], dict[str, Any]]:
    """Views in place of arrays and scalars in order, and constants by name."""
    names = {p.name for p in kernel.parameters}
    for name in [*request.shapes, *filter(None, request.dtypes)]:
        if name not in names:
            raise BadRequest(f"{kernel.name} has no tensor {name!r}; its parameters are {', '.join(sorted(names))}")
    consts = {n: v for n, v in request.values.items() if n not in names}
    lengths: dict[str, int] = {}
    for parameter in kernel.parameters:
        for dim, length in zip(parameter.dims or (), request.shapes.get(parameter.name, ()), strict=False):
            if isinstance(dim, str):
                lengths.setdefault(dim, length)
    for name in kernel.const_names:
        value = consts.get(name, kernel.defaults.get(name))
        if type(value) is int:
            lengths.setdefault(name, value)
    return [_argument(kernel, p, request, lengths) for p in kernel.parameters], consts


def _argument(kernel: Kernel, parameter: Parameter, request: Request, lengths: Mapping[str, int]) -> Any:
    name, shape = parameter.name, request.shapes.get(parameter.name)
    if name in request.values:  # a scalar, or None for a tensor that may be absent
        return request.values[name]
    if shape is None and parameter.dims is not None:
        sides = [d if isinstance(d, int) else lengths.get(d, DEFAULT_LENGTH) for d in parameter.dims]
        shape = tuple(sides)
    if shape is not None:
        dtype = request.dtypes.get(name, request.dtypes.get("", dtypes.float32))
        for length in shape:
            catalogue.check_length(name, length)
        return View(dtype, shape, dense(shape), "cpu")
    if parameter.dtype is None:
        cure = f"--shape {name}=64x64 for a tensor, --{name}=1 for a scalar"
        raise BadRequest(f"the signature of {kernel.name} does not say what {name!r} is; give {cure}")
    return {"float": 1.0, "int": 1, "bool": True}[parameter.dtype.kind]
