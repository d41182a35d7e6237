"""`monotile emit`: what it writes is enough to launch a kernel. The launches here read the files and nothing else."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import json_schema
from arrays import Array, poisoned
from kernels.cases import agrees, normal, qkv
from monotile import metal
from monotile.cli import emission, inspection
from monotile.cli.catalogue import find_kernel
from monotile.cli.request import BadRequest, Request, parse_dtypes, parse_values
from monotile.errors import DeviceLimit
from monotile.kernels import reference
from monotile.language import Tensor, kernel, program_id
from test_cli import monotile

needs_runner = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))


# ---- a launch by the manifest alone ----------------------------------------------------------------------------------


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def lengths(tensors: list[Any], arrays: dict[str, Array]) -> dict[str, int]:
    """The value of every symbol; arrays must be as long as the manifest says, and have the strides it says."""
    found: dict[str, int] = {}
    for tensor in tensors:
        array = arrays[tensor["name"]]
        assert array.ndim == len(tensor["shape"]) and str(array.dtype) == tensor["dtype"]
        for symbol, length in zip(tensor["shape"], array.shape, strict=True):
            assert (symbol if isinstance(symbol, int) else found.setdefault(symbol, length)) == length
        for wanted, stride in zip(tensor["strides"], array.strides, strict=True):
            assert wanted in (None, stride // array.itemsize)
    return found


def number(word: Any, arrays: dict[str, Array], scalars: dict[str, Any]) -> Any:
    if word["meaning"] == "scalar":
        return scalars[word["name"]]
    array = arrays[word["tensor"]]
    if word["meaning"] == "length":
        return array.shape[word["axis"]]
    if word["meaning"] == "stride":
        return array.strides[word["axis"]] // array.itemsize
    return {"offset": 0, "address": array.ctypes.data}[word["meaning"]]


def evaluate(expression: str, names: dict[str, Any]) -> int:
    return int(eval(expression, {"__builtins__": {}}, {**names, "min": min, "max": max}))


WHOLE = {"queries": 1, "first_block": 0, "blocks_per_split": 0}  # rows are not packed, keys not split


@needs_runner
def test_metal_attention_by_the_manifest(tmp_path: Path) -> None:
    words = "--causal=true --BR=32 --BK=32 --D=64 --dtype bfloat16"
    monotile("emit", "--target", "metal", "--kernel", "attention", "--out", str(tmp_path), *words.split())
    q, k, v = qkv(40, 71, 64, B=2, Hq=4, Hkv=2, dtype="bfloat16")
    for order in metal.ORDERS:
        found = metal.run_chain(tmp_path, {"q": q, "k": k, "v": v}, {"scale": 0.125}, order=order)
        report, (entry,) = found.reports["attention"].check(), manifest(tmp_path)["kernels"]
        assert report.counters.threadgroup_memory_bytes == entry["threadgroup_memory_bytes"]
        agrees((found.outputs["o"], found.outputs["lse"]), q, k, v, causal=True)


CHAINS = {
    "map": (("attention", "mask_blocks"), ["--D=64"], ["mask=bool", "block_map=uint8"], 150),
    "splits": (
        ("merge", "attention"),
        ["--D=80", "--packed=True", "--BR=8"],
        ["mask=float32", "split_o=float32", "sinks=float32"],
        2,
    ),
    "map and splits": (
        ("merge", "mask_blocks", "attention"),
        ["--D=32", "--Dv=16"],
        ["float16", "mask=bool", "block_map=uint8", "split_o=float32"],
        33,
    ),
}


@needs_runner
@pytest.mark.parametrize("name", CHAINS)
def test_metal_chains_by_the_manifest(name: str, tmp_path: Path) -> None:
    """Kernels that are written together agree on blocks, head sizes and the memory between them. What the caller passes
    is what attention is about: arrays and a scale."""
    kernels, words, dtypes, queries = CHAINS[name]
    request = Request(parse_values(words), {}, parse_dtypes(dtypes))
    emission.write("metal", [find_kernel(kernel) for kernel in kernels], request, tmp_path)
    (chain,) = manifest(tmp_path)["chains"]
    assert {launch["kernel"] for launch in chain["launches"]} == set(kernels)
    D, Dv = request.values["D"], request.values.get("Dv", request.values["D"])
    q, k, v = qkv(queries, 300, D, Hq=4, Hkv=2, dtype="float16" if "float16" in dtypes else "float32")
    v = np.ascontiguousarray(v[..., :Dv])
    seen = np.random.default_rng(0).random((1, 4, queries, 300)) < 0.5
    seen[..., 128:192], seen[..., :64] = False, True
    mask = seen if "mask=bool" in dtypes else np.where(seen, 0, -np.inf).astype(np.float32)
    options = {"sinks": normal(4)} if "sinks=float32" in dtypes else {}
    found = metal.run_chain(tmp_path, {"q": q, "k": k, "v": v, "mask": mask, **options}, {"scale": 0.1})
    for report in found.reports.values():
        report.check()
    if "block_map" in found.outputs:
        assert {0, 2} <= set(found.outputs["block_map"].reshape(-1).tolist()) <= {0, 1, 2, 3}
    agrees((found.outputs["o"], found.outputs["lse"]), q, k, v, scale=0.1, mask=mask, **options)


@pytest.mark.parametrize("dtypes", [["q_offsets=int32", "k_offsets=int32"], ["k_pages=float32"]])
def test_attention_that_only_the_library_runs(dtypes: list[str]) -> None:
    with pytest.raises(BadRequest, match=f"attention with {dtypes[0].partition('=')[0]}.* cannot be emitted"):
        emission.emit("metal", [find_kernel("attention")], Request({"D": 64}, {}, parse_dtypes(dtypes)))


@needs_runner
def test_a_chain_that_cannot_be_launched(tmp_path: Path) -> None:
    """Nothing runs where an array, a number or a relation of the manifest does not hold."""
    emission.write("metal", [find_kernel("attention")], Request({"D": 32, "packed": True}), tmp_path)
    q, k, v = qkv(4, 20, 32, Hq=4, Hkv=2)
    good = {"q": q, "k": k, "v": v}
    for arrays, numbers, phrase in (
        ({"q": q, "k": k}, {"scale": 1.0}, "takes the arrays k, q, v; found q, k"),
        (good, {}, "takes the number scale"),
        (good, {"scale": -1.0}, "attention needs scale >= 0; found scale = -1.0"),
        ({**good, "v": v[..., :16].copy()}, {"scale": 1.0}, r"v has shape \(1, 2, 20, 16\)"),
        ({**good, "q": q.astype(np.float16)}, {"scale": 1.0}, "q is float16; expected a contiguous array of float32"),
        ({**good, "q": q[:, :3].copy()}, {"scale": 1.0}, "q has 384 elements"),
    ):
        with pytest.raises(metal.LaunchError, match=phrase):
            metal.run_chain(str(tmp_path), arrays, numbers)
    with pytest.raises(BadRequest, match="packs those of several"):
        request = Request({"packed": True}, {}, parse_dtypes(["mask=bool", "block_map=uint8"]))
        emission.emit("metal", [find_kernel("attention"), find_kernel("mask_blocks")], request)
    with pytest.raises(BadRequest, match="attention takes split_m as float32, and split_m of the chain is float16"):
        request = Request({}, {}, parse_dtypes(["split_o=float32", "m=float16"]))
        emission.emit("metal", [find_kernel("attention"), find_kernel("merge")], request)


@needs_runner
def test_numbers_of_the_swift_package(tmp_path: Path) -> None:
    """A right launch is as near to the numbers in the folder as they ask, and a wrong one is not."""
    words = "--kernel attention --kernel merge --D=32 --negative --dtype float16 --dtype split_o=float32 --with swift"
    monotile("emit", "--target", "metal", "--out", str(tmp_path), *words.split())
    assert (tmp_path / "Package.swift").exists() and (
        tmp_path / "Tests/MonotileKernelsTests/KernelTests.swift"
    ).exists()
    (case,) = json.loads((tmp_path / "check.json").read_text())["cases"]

    def load(described: Any) -> Array:
        data = np.frombuffer((tmp_path / described["file"]).read_bytes(), described["dtype"])
        return data.reshape(described["shape"]).copy()

    inputs = {name: load(described) for name, described in case["inputs"].items()}
    for more, holds in (({}, True), ({"scale": 0.9 * case["numbers"]["scale"]}, False)):
        found = metal.run_chain(tmp_path, inputs, {**case["numbers"], **more}, chain=case["chain"])
        for name, described in case["outputs"].items():
            error = np.abs(found.outputs[name].astype(float) - load(described).astype(float)).max()
            assert (error <= described["allowed"]) == holds, name


def test_packages_that_cannot_be_written() -> None:
    with pytest.raises(BadRequest, match="--with swift is not known for cpu"):
        emission.emit("cpu", [find_kernel("merge")], Request(), package="swift")
    with pytest.raises(BadRequest, match="which holds uint8: emit mask_blocks with it"):
        request = Request({}, {}, parse_dtypes(["mask=bool", "block_map=uint8"]))
        emission.emit("metal", [find_kernel("attention")], request, package="swift")


def test_blocks_that_do_not_fit_the_map() -> None:
    both = [find_kernel("mask_blocks"), find_kernel("attention")]
    request = Request({"BQ": 16, "BR": 32}, {}, parse_dtypes(["mask=bool", "block_map=uint8"]))
    with pytest.raises(BadRequest, match="attention reads a block map of BQ=32"):
        emission.emit("metal", both, request)


def test_emission_allocates_nothing(tmp_path: Path) -> None:
    """Not the arrays that it describes: 2^20 rows of 512 would be gigabytes."""
    tracemalloc.start()
    emission.emit("metal", [find_kernel("attention")], Request({"D": 512}, {"q": (1, 8, 2**20, 512)}, {}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 28


def test_cpu_by_the_manifest(tmp_path: Path) -> None:
    """The object is linked, its words filled in and every program run."""
    from monotile.backends.cpu import jit

    monotile("emit", "--target", "cpu", "--kernel", "attention", "--out", str(tmp_path), "--D=48", "--softcap=20.0")
    (entry,) = manifest(tmp_path)["kernels"]
    assert f"define void @{entry['name']}(" in (tmp_path / entry["file"]).read_text()
    code = jit.load_object((tmp_path / entry["object"]).read_bytes())
    q, k, v = qkv(37, 50, 48, Hq=4, Hkv=2)
    o, lse = poisoned(q.shape), poisoned(q.shape[:3])
    arrays, scalars = {"q": q, "k": k, "v": v, "o": o, "lse": lse}, {"scale": 0.2, **WHOLE}
    names = {**lengths(entry["tensors"], arrays), **scalars}
    words = (ctypes.c_int64 * len(entry["words"]))()
    for n, word in enumerate(entry["words"]):
        value = number(word, arrays, scalars)
        words[n] = struct.unpack("<i", struct.pack("<f", value))[0] if word.get("dtype") == "float32" else value
    room = np.empty(entry["scratch_bytes"] + entry["scratch_alignment"], np.uint8)
    scratch = -(-room.ctypes.data // entry["scratch_alignment"]) * entry["scratch_alignment"]
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(code.address(entry["name"]))
    count = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.address(f"{entry['name']}_programs"))
    programs = evaluate(entry["grid"][0], names)
    assert programs == count(ctypes.addressof(words))
    for program in range(programs):
        run(ctypes.addressof(words), program, scratch)
    agrees((o, lse), q, k, v, scale=0.2, softcap=20.0)


def test_nvidia_names_every_parameter(tmp_path: Path) -> None:
    """Neither Triton nor a GPU is needed to write it."""
    monotile("emit", "--target", "nvidia", "--kernel", "attention", "--out", str(tmp_path), "--dtype", "float16")
    (entry,) = manifest(tmp_path)["kernels"]
    tree = ast.parse((tmp_path / entry["file"]).read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry["name"])
    assert [a.arg for a in function.args.args] == [a["name"] for a in entry["arguments"]]
    arrays = dict(zip("qkv", qkv(300, 41, 128, Hq=4, dtype="float16"), strict=True))
    arrays |= {"o": arrays["q"], "lse": poisoned((1, 4, 300))}
    scalars = {"scale": 0.5, **WHOLE}
    names = {**lengths(entry["tensors"], arrays), **scalars}
    assert all(number(word, arrays, scalars) is not None for word in entry["arguments"])
    assert evaluate(entry["grid"][0], names) == 4 * -(-300 // entry["constants"]["BR"])
    assert entry["options"]["num_warps"] in (4, 8)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter does not compile")
def test_nvidia_compiles_by_the_manifest(tmp_path: Path) -> None:
    """To PTX for a GPU that need not be there."""
    triton = pytest.importorskip("triton")
    from triton.backends import compiler

    emission.write("nvidia", [find_kernel("attention")], Request({"BR": 32, "BK": 32, "D": 32}), tmp_path)
    (entry,) = manifest(tmp_path)["kernels"]
    spec = importlib.util.spec_from_file_location("emitted", tmp_path / entry["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    types = {"address": "*fp32", "length": "i32", "stride": "i64", "scalar": "fp32"}
    signature = {a["name"]: types[a["meaning"]] for a in entry["arguments"]}
    source = triton.compiler.ASTSource(getattr(module, entry["name"]), signature, {})
    made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options=entry["options"])
    assert entry["name"] in made.asm["ptx"]


# ---- the contract ----------------------------------------------------------------------------------------------------

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "guide" / "manifest.schema.json").read_text())
CONTRACTS = [
    (("attention",), {}, ["mask=float32", "block_map=uint8", "sinks=float32"]),
    (("attention", "merge"), {"packed": True, "BR": 16, "causal": True}, ["bfloat16", "split_o=float32"]),
    (("attention", "mask_blocks"), {"negative": True}, ["mask=bool", "block_map=uint8"]),
    (("merge_lse",), {}, []),
    (("matmul",), {}, ["bfloat16"]),
    (("row_softmax",), {}, []),
]


@pytest.mark.parametrize("names, values, dtypes", CONTRACTS)
def test_the_manifest_is_as_its_schema_says(names: tuple[str, ...], values: dict[str, Any], dtypes: list[str]) -> None:
    request = Request(values, {}, parse_dtypes(dtypes))
    _, found = emission.emit("metal", [find_kernel(name) for name in names], request)
    assert list(json_schema.mistakes(found, SCHEMA)) == []
    for entry in found["kernels"]:
        assert entry["language_version"] == ("3.1" if "bfloat16" in dtypes else "2.3")
        scalars = {w["name"] for b in entry["buffers"] for w in b.get("words", ()) if w["meaning"] == "scalar"}
        lengths = {d for b in entry["buffers"] for d in b.get("shape", ()) if isinstance(d, str)}
        used = {
            node.id for text in entry["relations"] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)
        }
        assert used <= scalars | lengths


def test_the_schema_finds_mistakes() -> None:
    _, found = emission.emit("metal", [find_kernel("merge")], Request())
    (entry,) = found["kernels"]
    for broken in (
        {"threads": [32]},
        {"file": "../x.metal"},
        {"math_modes": ["none"]},
        {"color": 1},
        {"grid": [1, 1, 1]},
        {"registers_per_thread": "many"},
        {"threadgroups_per_core": 0},
    ):
        assert list(json_schema.mistakes({**found, "kernels": [{**entry, **broken}]}, SCHEMA)), broken
    assert list(json_schema.mistakes({**found, "kernels": [{"name": "merge"}]}, SCHEMA))


def test_relations_say_what_a_launch_needs() -> None:
    request = Request({"BR": 32, "BK": 16}, {}, parse_dtypes(["mask=bool", "block_map=uint8", "split_o=float32"]))
    _, found = emission.emit("metal", [find_kernel("attention")], request)
    (entry,) = found["kernels"]
    good = {"H": 4, "Hkv": 2, "Hq": 4, "R": 40, "Nq": 40, "Nk": 70, "MR": 2, "MK": 5, "S": 3, "queries": 1}
    good |= {"first_block": 0, "blocks_per_split": 2, "scale": 0.5}
    assert all(evaluate(relation, good) for relation in entry["relations"])
    for wrong in ({"MR": 1}, {"MK": 3}, {"S": 2}, {"scale": -1.0}, {"Hkv": 3}, {"Nq": 41}, {"first_block": 1}):
        assert not all(evaluate(relation, {**good, **wrong}) for relation in entry["relations"]), wrong
    assert entry["codes"] == {"block_map": {"0": "hidden", "1": "partial", "2": "full", "3": "covered"}}


# ---- what can be asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["metal", "nvidia", "cpu"])
@pytest.mark.parametrize("name", ["attention", "merge", "merge_lse", "mask_blocks", "matmul", "row_softmax"])
def test_every_kernel_for_every_target(name: str, target: str) -> None:
    files, found = emission.emit(target, [find_kernel(name)], Request({}, {}, {}))
    (entry,) = found["kernels"]
    assert files[entry["file"]] and json.loads(json.dumps(found)) == found
    assert entry["grid"][1:] == ["1", "1"] and found["target"] == target


@pytest.mark.parametrize("target", ["metal", "nvidia", "cpu"])
def test_states_of_splits_take_the_place_of_the_output(target: str) -> None:
    """One of the three asks for all."""
    request = Request({"packed": True, "BR": 16}, {}, parse_dtypes(["float16", "split_m=float32"]))
    _, found = emission.emit(target, [find_kernel("attention")], request)
    (entry,) = found["kernels"]
    tensors = entry.get("tensors") or [b for b in entry["buffers"] if b["role"] != "words"]
    assert [t["name"] for t in tensors] == ["q", "k", "v", "split_o", "split_m", "split_l"]
    assert "S" in entry["grid"][0] and entry["constants"]["packed"] is True


def test_options_and_optional_tensors() -> None:
    dtypes = parse_dtypes(["float16", "mask=float32", "sinks=float32"])
    values = parse_values(["--causal=upper_left", "--left=7", "--lse=None"])
    _, found = emission.emit("metal", [find_kernel("attention")], Request(values, {}, dtypes))
    (entry,) = found["kernels"]
    tensors = {b["name"]: b["dtype"] for b in entry["buffers"] if b["role"] != "words"}
    assert tensors == {
        "q": "float16", "k": "float16", "v": "float16", "mask": "float32", "sinks": "float32", "o": "float16",
    }  # fmt: skip
    assert entry["constants"]["options"] | {"causal": "upper_left", "left": 7} == entry["constants"]["options"]


KERNEL = """from monotile.language import *

@kernel
def shift(x, y: Tensor["N"], low: int, *, B: Const = 32):
    i = program_id(maximum(cdiv(y.shape[0] - low, B), 0)) * B + low + arange(B)
    y[i] = y[i] + x[i]
"""


@needs_runner
def test_a_kernel_of_a_file(tmp_path: Path) -> None:
    """Lengths without a name, a grid that depends on a scalar, a tensor that is read and written."""
    (tmp_path / "own.py").write_text(KERNEL)
    monotile(
        "emit", "--target", "metal", "--kernel", f"{tmp_path}/own.py:shift", "--out", str(tmp_path), "--shape", "x=64"
    )
    (entry,) = manifest(tmp_path)["kernels"]
    assert [b["role"] for b in entry["buffers"]] == ["input", "input and output", "words", "words"]
    x, y = normal(100), normal(100, seed=1)
    before = y.copy()
    metal.run_chain(tmp_path, {"x": x, "y": y}, {"low": 33}).reports["shift"].check()
    np.testing.assert_array_equal(y, before + np.where(np.arange(100) < 33, 0, x))


@pytest.mark.parametrize(
    "words, phrase",
    [
        (("--target", "abacus", "--kernel", "merge"), "there is no backend 'abacus'"),
        (("--target", "interpreter", "--kernel", "merge"), "makes nothing that could be written"),
        (("--target", "metal", "--kernel", "flash"), "attention, row_deltas, backward_queries"),
        (("--target", "metal", "--kernel", "merge", "--BQ=3"), "nothing in merge is called 'BQ'"),
        (("--target", "metal", "--kernel", "attention", "--D=-1"), "--D=-1 is a length"),
        (("--target", "cpu", "--kernel", "merge", "--kernel", "merge"), "two kernels are named 'merge'"),
        (("--target", "metal", "--kernel", "merge", "--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    ],
)
def test_mistakes(words: tuple[str, ...], phrase: str, tmp_path: Path) -> None:
    out = () if "--out" in words else ("--out", str(tmp_path / "out"))
    assert phrase in monotile("emit", *words, *out, code=1)
    assert not (tmp_path / "out").exists()


def test_a_grid_that_cannot_be_written() -> None:
    @kernel
    def odd(x: Tensor["N M"], share: float):
        x[program_id(int(float(x.shape[0]) * share)), 0] = 1.0

    with pytest.raises(DeviceLimit, match="a manifest cannot say"):
        emission.emit("metal", [odd], Request())


@pytest.mark.parametrize("backend, stage", [("nvidia", "gluon"), ("metal", "metal"), ("cpu", "llvm")])
def test_inspect_needs_no_device(backend: str, stage: str) -> None:
    """What a backend would run can be read where it cannot run."""
    text = monotile("inspect", "attention", "--backend", backend, "--stage", stage, "--D=64")
    assert "attention" in text or "define void @kernel(" in text


def test_a_stage_that_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    plain = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "triton" and rest[-1] == 0:  # not monotile's own folder of that name
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return plain(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadRequest, match="'ptx' needs triton; run: pip install triton"):
        inspection.text("merge", "ptx", Request(), "nvidia")


def test_the_reference_agrees_with_itself() -> None:
    """The comparison the tests above make can fail."""
    q, k, v = qkv(9, 9, 8)
    out, lse = (x.astype(np.float32) for x in reference.attention(q, k, v))
    agrees((out, lse), q, k, v)
    out[0, 0, 0, 0] += np.float32(1e-3)
    with pytest.raises(AssertionError):
        agrees((out, lse), q, k, v)
