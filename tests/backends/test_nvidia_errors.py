"""What is said where the nvidia backend cannot run, with stand-ins for drivers and GPUs that fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monotile import errors
from monotile.backends.nvidia import backend, build, launcher, program
from monotile.backends.nvidia.gluon import support
from monotile.runtime import arrays

torch = pytest.importorskip("torch", reason="the nvidia backend needs torch")
pytest.importorskip("triton", reason="the nvidia backend needs triton")


def why_not(monkeypatch: pytest.MonkeyPatch, said: str = "", triton: str = "3.6.0") -> str:
    """Why the backend cannot run with this driver and Triton."""

    def init() -> None:
        if said:
            raise RuntimeError(said)

    monkeypatch.setattr(build, "interpreting", lambda: False)
    monkeypatch.setattr(support, "triton_version", lambda: triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    found = backend.BACKEND.why_not()
    assert found is not None
    return found


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(monkeypatch).startswith("torch sees no NVIDIA GPU; use backend='cpu'")


def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    said = why_not(monkeypatch, said="Found no NVIDIA driver on your system.\nPlease check")
    assert said.startswith("torch sees no NVIDIA GPU (Found no NVIDIA driver on your system.); use backend='cpu'")


def test_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    said = why_not(monkeypatch, triton="3.1.0")
    assert said == "Triton 3.1.0 is too old, it needs 3.2: pip install 'triton>=3.2'"


@pytest.mark.parametrize(("said", "kind", "cure"), [
    ("Triton Error [CUDA]: out of memory", errors.OutOfDeviceMemory, "free arrays"),
    ("Triton Error [CUDA]: an illegal memory access was encountered", errors.LaunchFailed, "start a new one"),
    ("Triton Error [CUDA]: invalid argument", errors.LaunchFailed, "nothing was launched"),
])  # fmt: skip
def test_a_launch_that_fails(said: str, kind: type[Exception], cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch, which compiles, and a later one; the launch after a failed one is tried again."""
    assert isinstance(build.translated(RuntimeError(said), "f"), kind)
    failing = [True]

    def run(*args: Any) -> None:
        if failing.pop():
            raise RuntimeError(said)

    gpu = SimpleNamespace(current_device=lambda: 0, current_stream=lambda device: 7)
    monkeypatch.setattr(program, "runtime", lambda: gpu)
    variant = SimpleNamespace(
        described=[], host_described=[], int64_scalars=[], source=SimpleNamespace(name="f"),
        pick_pointers=lambda addresses: addresses, pick_scalars=lambda scalars: scalars,
    )  # fmt: skip
    compiled = {(0, True, ()): launcher.LoadedKernel(run, lambda n, descriptor: [])}
    bound: Any = SimpleNamespace(
        device=None, variant=variant, compiled=compiled, descriptors={}, without_descriptors=None, grid=1, lengths=[],
        tiles=(),
    )  # fmt: skip
    self: Any = SimpleNamespace(kernel=None)
    with pytest.raises(kind, match=cure):
        program.NvidiaProgram.launch(self, bound, (), [16], (), None)
    failing.append(False)
    program.NvidiaProgram.launch(self, bound, (), [16], (), None)


def test_no_memory_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def empty(*args: Any, **words: Any) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total capacity of ...")

    library = arrays.Torch()
    library.torch = SimpleNamespace(empty_like=empty, contiguous_format=None)
    with pytest.raises(errors.OutOfDeviceMemory, match=r"shape \(2, 3\); free arrays.*Tried to allocate 9 GiB$"):
        library.allocate(SimpleNamespace(shape=(2, 3)))
