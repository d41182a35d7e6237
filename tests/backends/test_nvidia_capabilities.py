"""Every capability: blocks, stages and paths that fit its shared memory, without a GPU, and a sample compiled."""

from __future__ import annotations

from typing import Any

import pytest

from backends.nvidia_kernels import compiled, lowered
from kernel_calls import over_all_keys
from monotile.backends.nvidia import build, choices, device, paths
from monotile.backends.nvidia.choices import NvidiaChoices
from monotile.backends.nvidia.device import DESCRIBED, HOPPER, described, gpu
from monotile.backends.nvidia.gluon import shared_memory, support
from monotile.backends.nvidia.schedule import Schedule, choose
from monotile.cli import ahead
from monotile.dtypes import bfloat16, bool_, float32
from monotile.kernels.attention import attention
from monotile.kernels.scores import Options
from monotile.runtime.tensors import View, dense
from problems import problem

HEAD_SIZES = (1, 17, 64, 80, 96, 128, 192, 256, 320, 512, 576)


def test_described_gpus() -> None:
    """As the driver reports them."""
    kib = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
    assert {name: gpu(name).shared_bytes >> 10 for name in DESCRIBED} == kib
    assert described("sm_999").shared_bytes == device.LEAST_SHARED_KIB * 1024
    assert gpu("sm_90") == HOPPER


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_blocks_fit_by_the_model(name: str, dtype: str) -> None:
    """Down to the smallest block, which is what it is; larger heads never have larger blocks."""
    sizes = []
    for mask in (None, bool_, float32):
        for D in HEAD_SIZES:
            call = problem(D, dtype, device=name, mask=mask)
            blocks = NvidiaChoices().row_blocks(call).blocks
            rows, keys = blocks["BR"] or 0, blocks["BK"] or 0
            sizes.append((rows * keys, D))
            least = rows == keys == choices.LEAST_BLOCK
            assert least or choices.shared_bytes(call, rows, keys) <= gpu(name).shared_bytes
    assert choices.LEAST_BLOCK**2 in [size for size, _ in sizes] or dtype == "bfloat16"


def test_a_choice_is_the_same_every_time() -> None:
    for name in DESCRIBED:
        call = problem(128, "bfloat16", device=name)
        assert NvidiaChoices().attention(call) == NvidiaChoices().attention(call)


def test_measured_blocks_are_kept() -> None:
    """The tables of Hopper, where nothing had to be made smaller; GPUs of 99 KiB have two stages of smaller ones."""
    for D, rows, keys in ((128, 128, 128), (256, 128, 64), (512, 64, 64)):
        found = choices._fitting(problem(D, "bfloat16", device="sm_90")).blocks
        assert (found["BR"], found["BK"]) == (rows, keys)
    small = choices._fitting(problem(128, "bfloat16", device="sm_86")).blocks
    assert (small["BR"], small["BK"]) == (128, 64)
    assert (
        choices.shared_bytes(problem(128, "bfloat16", device="sm_86"), 128, 64, stages=2) <= gpu("sm_86").shared_bytes
    )


def kernel_of(D: int, BR: int, BK: int) -> Any:
    q, k = (View(bfloat16, (1, 2, n, D), dense((1, 2, n, D)), "cpu") for n in (1024, 1024))
    return lowered(attention.ir(*over_all_keys(q, k, k, q), options=Options(), BR=BR, BK=BK))


def test_stages_follow_from_shared_memory() -> None:
    kernel = kernel_of(128, 128, 64)
    assert [choose(kernel, gpu(name).shared_bytes).num_stages for name in ("sm_86", "sm_80", "sm_90")] == [2, 3, 3]


@compiled
@pytest.mark.skipif(not support.version_supported(), reason="the Gluon text is for another Triton")
@pytest.mark.parametrize(("D", "BK", "schedule"), [
    (64, 64, Schedule(4, 2, consumers=2)),
    (128, 32, Schedule(4, 2, consumers=1)),
])  # fmt: skip
def test_tiles_of_a_gluon_module_are_counted(D: int, BK: int, schedule: Schedule) -> None:
    kernel = kernel_of(D, 64, BK)
    path = paths.select(kernel, schedule)
    assert path.pipeline is not None
    needed = shared_memory.needed(path.pipeline, schedule)
    made, _ = build.compile_fitting(kernel, path)
    assert needed - 4096 <= made.metadata.shared <= needed + 5 * 1024


SAMPLE = [
    *(ahead.AheadCall(name, "bfloat16", 128, "prefill", "causal") for name in DESCRIBED),
    *(ahead.AheadCall(name, "bfloat16", 512, "prefill", "plain") for name in ("sm_86", "sm_120")),
    ahead.AheadCall("sm_89", "float16", 256, "few queries", "plain"),
    ahead.AheadCall("sm_80", "float32", 64, "decode", "causal"),
    ahead.AheadCall("sm_120", "float32", 512, "prefill", "plain"),
    ahead.AheadCall("sm_86", "bfloat16", 64, "prefill", "plain", "gradients"),
    ahead.AheadCall("sm_120", "bfloat16", 128, "decode", "plain", "int8"),
    ahead.AheadCall("sm_90", "bfloat16", 128, "decode", "causal", "paged rows"),
    ahead.AheadCall("sm_90", "bfloat16", 128, "prefill", "causal", "paged rows"),
]


@compiled
@pytest.mark.parametrize("call", SAMPLE, ids=str)
def test_a_sample_compiles(call: ahead.AheadCall) -> None:
    """`monotile compile` compiles the others."""
    for kernel in ahead.compiled(call):
        assert not kernel.problem and 0 < kernel.shared <= gpu(call.device).shared_bytes
        assert kernel.spilled <= 1600


def test_every_call_of_the_matrix_is_planned() -> None:
    """Blocks and schedules for every capability and option, without compiling."""
    assert len(ahead.calls(list(DESCRIBED), only=" attention ")) == 6 * 3 * 16 * 3 * 7
    for work in ahead.WORKS:
        for call in ahead.calls(list(DESCRIBED), only=f" {work} ", sample=40 if work == "attention" else 2, seed=3):
            kernel = "backward_keys" if "gradients" in call.work else "attention"
            assert kernel in [launch.kernel.name for launch in ahead.launches(call)], call


def test_arrays_of_the_matrix() -> None:
    """Each kind of work gets the arrays and the kernels it is named for."""
    latent = ahead.AheadCall("sm_90", "bfloat16", 576, "decode", "plain", "MLA")
    assert latent.Dv == 512 and str(latent) == "sm_90 MLA bfloat16 D 576 decode, plain"
    assert ahead._arrays(latent)["v"].strides == ahead._arrays(latent)["k"].strides
    for work in ("int4", "aura4"):
        assert {"k_codes", "v_codes"} <= _tensors(latent._replace(D=64, work=work)), work
    assert "v" not in _tensors(latent) and "v" in _tensors(latent._replace(work="other Dv"))
    assert {"k_pages", "page_table"} <= _tensors(latent._replace(D=64, work="paged 16"))
    assert {"k_pages", "page_table", "q_offsets"} <= _tensors(latent._replace(D=64, work="paged rows"))
    assert {"q_offsets", "k_offsets"} <= _tensors(latent._replace(D=64, work="varlen"))


def _tensors(call: ahead.AheadCall) -> set[str]:
    """Names of the tensors that the attention kernel of a call takes."""
    return {t.name for launch in ahead.launches(call) if launch.kernel.name == "attention" for t in launch.form.tensors}


def test_words_of_the_filter_match_from_their_beginning() -> None:
    assert {call.dtype for call in ahead.calls(["sm_90"], only="float16 prefill")} == {"float16"}


def test_command_names_what_it_does_not_know() -> None:
    from rich.console import Console

    from monotile.cli.request import BadRequest

    with pytest.raises(BadRequest, match="no described GPU 'sm_91'; known are sm_80"):
        ahead.run(Console(), ["sm_91"])
    with pytest.raises(BadRequest, match="words that begin as those of 'nothing'"):
        ahead.run(Console(), ["sm_90"], only="nothing")
