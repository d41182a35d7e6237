"""The host's side of a launch on an NVIDIA GPU, with a stand-in for the driver: what is compiled, what is launched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

import monotile
from kernel_calls import over_all_keys
from monotile import errors
from monotile.backends.nvidia import backend, build, choices, device, launcher, measured, paths, program
from monotile.backends.nvidia.gluon import persistent
from monotile.backends.nvidia.schedule import Schedule
from monotile.backends.nvidia.triton.descriptors import DescribedTensor, HostDescriptor
from monotile.dtypes import bfloat16
from monotile.kernels.attention import attention
from monotile.kernels.scores import Options
from monotile.library import ops
from monotile.runtime.tensors import View, dense

torch = pytest.importorskip("torch", reason="the nvidia backend needs torch")
pytest.importorskip("triton", reason="the nvidia backend needs triton")
pytestmark = pytest.mark.skipif(build.interpreting(), reason="Triton's interpreter launches otherwise")


class Launched(NamedTuple):
    device: int
    grid: int
    stream: int
    arguments: tuple[Any, ...]


@dataclass
class Gpu:
    """Notes compilations and launches, and computes nothing."""

    current: int = 0
    stream: int = 7
    compiled: list[tuple[str, list[Any]]] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)

    def compile_and_launch(self, kernel: Any, variant: Any, grid: int, given: list[Any], tail: list[Any]) -> Any:
        self.compiled.append((variant.source.name, given))
        launch = lambda *launched: self.launched.append(Launched(self.current, *launched))  # noqa: E731
        return launcher.LoadedKernel(launch, lambda n, descriptor: [descriptor])

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    runtime = device.Runtime(
        lambda: found.current, lambda device: found.stream, found.device, lambda allocator: None, lambda device: 132
    )
    monkeypatch.setattr(program, "runtime", lambda: runtime)
    monkeypatch.setattr(program, "compile_and_launch", found.compile_and_launch)
    monkeypatch.setattr(backend.NvidiaBackend, "why_not", lambda self: None)
    monkeypatch.setattr(backend.NvidiaBackend, "accepts", lambda self, device: True)
    monkeypatch.setattr(ops._ATTENTION, "calls", {})
    monkeypatch.setattr(choices, "gpu", lambda name: device.Gpu("a stand-in", "", 132))
    monkeypatch.setattr(program, "gpu", lambda name: device.HOPPER)
    return found


def attend(Nq: int, Nk: int, shift: int = 0) -> Any:
    """On memory that begins `shift` elements after an aligned place."""
    q, k, v = (
        torch.zeros(h * n * 64 + shift, dtype=torch.bfloat16)[shift:].view(1, h, n, 64)
        for h, n in ((8, Nq), (2, Nk), (2, Nk))
    )
    out = monotile.attention(q, k, v, backend="nvidia")
    return q, k, v, out


@pytest.mark.parametrize("Nq, Nk, launches", [(1, 100, 1), (1, 100_000, 2), (200, 100, 1)])
def test_a_warm_call_only_launches(Nq: int, Nk: int, launches: int, gpu: Gpu) -> None:
    attend(Nq, Nk)
    assert len(gpu.compiled) == launches and not gpu.launched
    q, k, v, out = attend(Nq, Nk)
    assert len(gpu.compiled) == launches and len(gpu.launched) == launches
    pointers = [x.data_ptr() for x in (q, k, v)]
    assert all(any(p == a for a in gpu.launched[0].arguments) for p in pointers)
    assert out.data_ptr() in gpu.launched[-1].arguments
    assert all(call.stream == gpu.stream for call in gpu.launched)


def test_alignment_makes_another_kernel(gpu: Gpu) -> None:
    """Triton compiles for addresses that are multiples of 16 bytes, and others get a kernel of their own."""
    for shift in (0, 1, 0, 8, 1):
        attend(1, 100, shift)
    assert len(gpu.compiled) == 2 and len(gpu.launched) == 3
    (_, even), (_, odd) = gpu.compiled
    tensors = [[p.data_ptr() % 16 for p in given if isinstance(p, program.Pointer)] for given in (even, odd)]
    assert not any(tensors[0]) and any(tensors[1])


def test_a_pointer_is_a_tensor_to_triton() -> None:
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from triton.backends.compiler import BaseBackend

    from monotile import dtypes

    for dtype in dtypes.ALL:
        tensor = torch.zeros(64, dtype=getattr(torch, dtype.name))
        for given in (tensor, tensor[1:]):
            pointer = program.Pointer(given.data_ptr(), dtype)
            assert specialize(BaseBackend, pointer, False, True, True) == specialize(
                BaseBackend, given, False, True, True
            )


def test_the_device_of_the_arrays_is_made_current(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = program.NvidiaProgram.bind
    monkeypatch.setattr(program.NvidiaProgram, "bind", lambda self, words, device="cpu": plain(self, words, "cuda:3"))
    for _ in range(2):
        attend(1, 100)
    assert gpu.launched[0].device == 3 and gpu.current == 0


# ---- Gluon modules ---------------------------------------------------------------------------------------------------

SHAPES = {"q": (1, 8, 1000, 128), "k": (1, 2, 1000, 128), "v": (1, 2, 1000, 128), "o": (1, 8, 1000, 128)}
SCALARS = [0.1, 1000, 0, 0]
ADDRESSES = [4096, 8192, 12288, 16384]


def gluon_program(*, persistent: bool = False, **strides: tuple[int, ...]) -> Any:
    q, k, v, o = (View(bfloat16, s, strides.get(name, dense(s)), "cpu") for name, s in SHAPES.items())
    choice = dict(measured.forward_table(persistent))[128]
    call = attention.ir(*over_all_keys(q, k, v, o), options=Options("lower_right"), **choice.blocks)
    return backend.BACKEND.compile_as(call, choice.schedule)


def words(**strides: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for name, shape in SHAPES.items():
        found += [0, *shape, *strides.get(name, dense(shape))]
    return [*found, 0, 0, 0, 0]


@pytest.mark.parametrize("persistent", [False, True])
def test_descriptors_come_first_and_are_kept(persistent: bool, gpu: Gpu) -> None:
    made = gluon_program(persistent=persistent)
    assert made.path.name == "gluon"
    bound = made.bind(words())
    for _ in range(3):
        made.launch(bound, [], ADDRESSES, SCALARS, None)
    ((_, given),) = gpu.compiled
    assert [type(a).__name__ for a in given] == ["TensorDescriptor"] * 4
    assert [a.block_shape[-2:] for a in given] == [[64, 128], [128, 128], [128, 128], [64, 128]]
    first, second = (call.arguments for call in gpu.launched)
    assert [d.address for d in first[:4]] == ADDRESSES[:4]
    assert all(a is b for a, b in zip(first[:4], second[:4], strict=True))
    assert bound.tiles == (first[-1:] if persistent else ())
    assert gpu.launched[0].grid == bound.grid == 8 * -(-16 // (2 * (bound.tiles[0] if persistent else 1)))


def test_what_tma_cannot_describe_runs_as_plain_triton(gpu: Gpu) -> None:
    made = gluon_program()
    for bound, addresses in (
        (made.bind(words()), [ADDRESSES[0] + 8, *ADDRESSES[1:]]),
        (made.bind(words(k=(2 * 1001 * 128, 1001 * 128, 132, 1))), ADDRESSES),
    ):
        made.launch(bound, [], addresses, SCALARS, None)
    plain = made.variant(wide=False, descriptors=False)
    assert [name for name, _ in gpu.compiled] == [plain.source.name] * 2


def test_the_plain_variant_has_offsets_of_its_own(gpu: Gpu) -> None:
    """TMA copies rows that lie far apart; pointers to them need 64-bit offsets."""
    rows = 512000, 256000, 256, 1
    made = gluon_program(k=rows)
    near, far = made.bind(words(k=rows)), made.bind(words(k=(512000, 256000, 2**26, 1)))
    assert near.variant is far.variant is made.default
    assert near.without_descriptors().variant is made.variant(wide=False, descriptors=False)
    assert far.without_descriptors().variant is made.variant(wide=True, descriptors=False)


def test_a_gpu_without_wgmma_runs_plain_triton(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gluon_program()
    found = {name: device.Gpu(name, architecture) for name, architecture in (("cuda:0", "sm_90"), ("cuda:1", "sm_100"))}
    monkeypatch.setattr(program, "gpu", found.__getitem__)
    assert made.bind(words(), "cuda:0").variant is made.default
    other = made.bind(words(), "cuda:1").variant
    assert other.path.pipeline is None and not other.described
    assert made.bind(words(), "cuda:1").variant is other


def test_a_gpu_with_less_shared_memory_has_fewer_stages(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program, bound on GPUs of two kinds; slots of the rings are counted before anything is compiled."""
    made = gluon_program()
    small = device.Gpu("cuda:1", "sm_90", shared_bytes=made.target.shared_bytes * 3 // 5)
    tiny = device.Gpu("cuda:2", "sm_90", shared_bytes=48 * 1024)
    found = {"cuda:0": device.HOPPER, "cuda:1": small, "cuda:2": tiny}
    monkeypatch.setattr(program, "gpu", found.__getitem__)
    stages = [made.bind(words(), name).variant.schedule.num_stages for name in found]
    assert stages[0] == 2 > stages[1] == 1
    plain = made.bind(words(), "cuda:2").variant
    assert (
        plain.path.pipeline is None
        and "bytes of shared memory; a CTA has 49152" in made.others["sm_90", 49152].why_plain
    )


def test_what_exceeds_shared_memory_is_compiled_with_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton says so before it launches; with one stage left it is an error."""
    tried: list[int] = []

    def refuse(variant: Any, grid: int, arguments: list[Any], rest: list[Any]) -> str:
        tried.append(variant.schedule.num_stages)
        if variant.schedule.num_stages > least:
            raise errors.DeviceLimit("too much")
        return variant.source.name

    monkeypatch.setattr(program, "_compile_and_launch", refuse)
    made = gluon_program()
    plain = program.Variant(made.kernel, paths.LaunchPath(Schedule(8, 3), None), "sm_90", wide=False)
    least = 1
    name = program.compile_and_launch(made.kernel, plain, 1, [], [])
    assert tried == [3, 2, 1] and name != plain.source.name
    least = 0
    with pytest.raises(errors.DeviceLimit, match="too much"):
        program.compile_and_launch(made.kernel, plain, 1, [], [])


# ---- Triton's launcher -----------------------------------------------------------------------------------------------


class Compiled:
    """A kernel that Triton compiled, as far as `launcher` looks: it is its own launcher."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True
    function, packed_metadata = "function", "packed"

    def __init__(self, launched: list[Any], forms: list[Any]) -> None:
        self.run, self.launched = self, launched

        def launcher(*args: Any) -> None:
            launched.append(args)

        tensordesc_indices, tensordesc_meta = {0, 1}, forms

        def launch(*args: Any) -> None:
            launcher((args, tensordesc_indices, tensordesc_meta))

        self.launch = launch if forms else launcher

    def __call__(self, *args: Any) -> None:
        self.launched.append(("Triton's own", *args))


def launched_twice(compiled: Compiled, descriptors: int) -> list[Any]:
    """What is launched with so many descriptors, a pointer and a number."""
    found = launcher.load(compiled, descriptors)
    tile = DescribedTensor(0, 2, (0,), (), (64,))
    for _ in range(2):
        encoded = [a for n in range(descriptors) for a in found.encode(n, HostDescriptor(16 * n + 16, tile, [64]))]
        found.launch(5, 7, (*encoded, 48, 1.5))
    return compiled.launched


DIRECTLY = (5, 1, 1, 7, "function", False, True, None, None, "packed", None, None, None)
BY_TRITON = ("Triton's own", 5, 1, 1, 7, "function", "packed", None, None, None)


def test_kernels_are_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_encode", lambda descriptor, form: [form, descriptor.address])
    monkeypatch.setattr(launcher.metadata, "version", lambda name: "3.6.0")
    assert launched_twice(Compiled([], ["k's", "v's"]), 2) == [(*DIRECTLY, "k's", 16, "v's", 32, 48, 1.5)] * 2
    assert launched_twice(Compiled([], []), 0) == [(*DIRECTLY, 48, 1.5)] * 2


def test_an_unknown_launcher_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.metadata, "version", lambda name: "3.7.0")
    assert launched_twice(Compiled([], []), 0) == [(*BY_TRITON, 48, 1.5)] * 2
    monkeypatch.setattr(launcher.metadata, "version", lambda name: "3.6.0")
    scratch = Compiled([], [])
    scratch.global_scratch_size = 8
    assert launched_twice(scratch, 0) == [(*BY_TRITON, 48, 1.5)] * 2
    ((*head, first, second, pointer, number), _) = launched_twice(Compiled([], [None, "v's"]), 2)
    assert tuple(head) == BY_TRITON and (first.address, second.address, pointer, number) == (16, 32, 48, 1.5)


@pytest.mark.parametrize(
    ("heads", "places", "most"),
    [(1, 1, 1), (256, 16, 16), (32, 16, 4), (16, 128, 16), (96, 12, 1)],  # the last: 9 rounds of one, or 5 of two
)
def test_tiles_per_cta_fill_the_gpu(heads: int, places: int, most: int) -> None:
    assert persistent.tiles_per_cta(lambda n: heads * -(-places // n), 132) == most
