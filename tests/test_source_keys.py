"""Source keys: calls with equal keys compile alike, and whatever the front end reads changes the key."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monotile import backends
from monotile.launch import source_keys
from monotile.launch.arguments import Arguments
from monotile.launch.captures import captures
from monotile.launch.kernel import Kernel
from monotile.runtime import cache

SOURCES = str(Path(cache.__file__).parents[2])

HELPERS = """
LIMIT = 3.0
def clip(x):
    return minimum(x, LIMIT)
def unused(x):
    return x
"""
MODULE = """
import math
from typing import NamedTuple
import numpy as np
from monotile.language import *
import helpers_of_keys as helpers

SCALE = 2.0
PAIR = (1, (2.0, float32))

class Two(NamedTuple):
    a: object
    b: object = 7

def added(x, y=0.5):
    return x + y

def kernel_maker(step):
    @kernel
    def captures(x: Tensor["N"], y: Tensor["N"], *, B: Const = 16):
        i = program_id(cdiv(x.shape[0], B))
        rows = i * B + arange(B)
        y[rows] = x[rows] + step
    return captures

captures = kernel_maker(1.0)

@kernel
def scale(x: Tensor["N"], y: Tensor["N"], *, B: Const = 16, mod: Const = None):
    i = program_id(cdiv(x.shape[0], B))
    rows = i * B + arange(B)
    pair = Two(x[rows] * SCALE)
    z = added(helpers.clip(pair.a)) * math.floor(PAIR[1][0]) + pow(PAIR[0], pair.b)
    if mod is not None:
        z = mod(z)
    y[rows] = z
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helpers_of_keys.py").write_text("from monotile.language import minimum\n" + HELPERS)
    (tmp_path / "module_of_keys.py").write_text(MODULE)
    yield tmp_path
    for name in ("helpers_of_keys", "module_of_keys"):
        sys.modules.pop(name, None)


def load(folder: Path) -> Any:
    """Load the module as a new process would."""
    for name in ("helpers_of_keys", "module_of_keys"):
        sys.modules.pop(name, None)
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        source = (folder / f"{name}.py").read_text()
        exec(compile(source, str(folder / f"{name}.py"), "exec"), vars(module))  # past any byte code on disk
    return module


def arrays(dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.arange(20, dtype=dtype), np.full(20, np.nan, dtype)


def key_of(kernel: Kernel, *args: Any, **consts: Any) -> str | None:
    call = Arguments(kernel.signature, args, captures(consts.values()), consts)
    found = source_keys.source_key(backends.get("cpu"), None, kernel.function, call.specialisation())
    return found.key if found is not None else None


def test_same_source_has_one_key(folder: Path) -> None:
    first = key_of(load(folder).scale, *arrays())
    assert first is not None
    assert key_of(load(folder).scale, *arrays()) == first
    assert key_of(load(folder).scale, *(np.zeros(99, np.float32), np.zeros(99, np.float32))) == first


EDITS = [
    ("module", "x[rows] * SCALE", "x[rows] / SCALE"),
    ("module", "SCALE = 2.0", "SCALE = 4.0"),
    ("module", "SCALE = 2.0", "SCALE = 2"),
    ("module", "(1, (2.0, float32))", "(1, (2.5, float32))"),
    ("module", "b: object = 7", "b: object = 8"),
    ("module", "y=0.5", "y=0.25"),
    ("module", "return x + y", "return x - y"),
    ("helpers", "LIMIT = 3.0", "LIMIT = 5.0"),
    ("helpers", "minimum(x, LIMIT)", "minimum(x, LIMIT + 1)"),
]


@pytest.mark.parametrize(("file", "old", "new"), EDITS)
def test_every_edit_has_another_key(folder: Path, file: str, old: str, new: str) -> None:
    first = key_of(load(folder).scale, *arrays())
    path = folder / f"{file}_of_keys.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert key_of(load(folder).scale, *arrays()) not in (None, first)


VALUES = [
    ("module", "SCALE", 4.0),
    ("module", "SCALE", np.float32(2)),
    ("module", "PAIR", (1, (2.5, None))),
    ("module", "PAIR", np.frombuffer(b"ab", np.uint8)),
    ("module", "added", lambda x: x),
    ("helpers", "LIMIT", 5.0),
    ("helpers", "clip", lambda x: x),
]


@pytest.mark.parametrize(("where", "name", "value"), VALUES, ids=[f"{n} {v!r:.20}" for _, n, v in VALUES])
def test_every_other_value_has_another_key(folder: Path, where: str, name: str, value: Any) -> None:
    """The files are unchanged; a global of this module or of another has been rebound."""
    module = load(folder)
    first = key_of(module.scale, *arrays())
    setattr(module if where == "module" else module.helpers, name, value)
    assert key_of(module.scale, *arrays()) not in (None, first)


def test_constants_types_and_captures_have_keys_of_their_own(folder: Path) -> None:
    module = load(folder)
    table, other = np.ones(4, np.float32), np.ones(4, np.float16)

    def by(factor: float) -> Any:
        return lambda z: z * factor

    def shifted(z: Any) -> Any:
        return z + 1.0

    def looked_up(z: Any, table: Any = None) -> Any:
        return z

    calls: list[tuple[Any, dict[str, Any]]] = [
        (arrays(), {}),
        (arrays(np.float16), {}),
        (arrays(), {"B": 32}),
        (arrays(), {"mod": by(2.0)}),
        (arrays(), {"mod": by(3)}),
        (arrays(), {"mod": shifted}),
        (arrays(), {"mod": lambda z: z * table[0]}),
        (arrays(), {"mod": lambda z: z * other[0]}),
        ((np.zeros(40, np.float32)[::2], arrays()[1]), {}),
    ]
    names = [key_of(module.scale, *args, **consts) for args, consts in calls]
    assert None not in names
    assert len(set(names)) == len(names)
    assert key_of(module.scale, *arrays(), mod=by(-0.5)) == names[3]  # a number is an argument
    assert key_of(module.captures, *arrays()) != key_of(module.kernel_maker(2.0), *arrays())
    two = [lambda z: z + 1.0, lambda z: z + 2.0]
    assert key_of(module.scale, *arrays(), mod=two[0]) != key_of(module.scale, *arrays(), mod=two[1])


class Named:
    value = 2.0


class Derived(tuple):
    __slots__ = ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SCALE", Named()),
        ("SCALE", Derived((1,))),
        ("PAIR", [1, (2.0, None)]),
        ("added", len.__call__),
        ("helpers", np),
        ("pow", hash),
        ("Two", Named),
        ("math", types.SimpleNamespace(floor=1)),
    ],
)
def test_what_cannot_be_named_has_no_key(folder: Path, name: str, value: Any) -> None:
    module = load(folder)
    setattr(module, name, value)
    assert key_of(module.scale, *arrays()) is None


def test_functions_of_a_named_tuple_have_no_key(folder: Path) -> None:
    """They would be inlined, and their globals are not followed."""
    path = folder / "module_of_keys.py"
    text = path.read_text().replace("b: object = 7", "b: object = 7\n    def added(x):\n        return x + SCALE\n")
    path.write_text(text)
    assert key_of(load(folder).scale, *arrays()) is None


def test_optimised_python_has_no_key(folder: Path) -> None:
    """With -O, asserts and their names are not in the code, but the front end still reads them."""
    code = "from monotile import backends\nfrom monotile.kernels import examples\n"
    code += "from monotile.launch import arguments, source_keys\n"
    code += "spec = arguments.Specialisation((), (), {}, {}, {})\n"
    code += "print(source_keys.source_key(backends.get('cpu'), None, examples.copy.function, spec))"
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    run = subprocess.run([sys.executable, "-O", "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "None", run.stderr


def test_recalled_program_is_that_of_the_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = arrays()
    load(folder).scale(x, y)
    expected = y.copy()
    module, (x, y) = load(folder), arrays()
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "build", lambda *_: pytest.fail("the front end ran"))
        module.scale(x, y)
    assert np.array_equal(y, expected)
    module.SCALE = -1.0  # the same process: the plan depends on what was looked at
    module.scale(x, y)
    assert not np.array_equal(y, expected)
    module.SCALE = 2.0
    module.scale(x, y)
    assert np.array_equal(y, expected)


def test_damaged_files_are_made_again(folder: Path) -> None:
    x, y = arrays()
    load(folder).scale(x, y)
    expected = y.copy()
    for kind in ("source_key", "cpu"):
        (path,) = (folder / "kernels").glob(f"*.{kind}")
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        y[:] = np.nan
        load(folder).scale(x, y)
        assert np.array_equal(y, expected)
        assert path.read_bytes() == whole


EVERY = """
from monotile.launch import source_keys
from monotile.library import check
from monotile.runtime import cache

seen, asked = set(), []
source_key, recall = source_keys.source_key, source_keys.recall

def watched_source_key(*args):
    found = source_key(*args)
    asked.append(found)
    return found

def watched_recall(backend, schedule, function, spec, compile_call):
    found = recall(backend, schedule, function, spec, compile_call)
    assert asked[-1] is not None, f"{function.__name__} has no source key"
    stored, fresh = cache.load(asked[-1].key, "source_key"), compile_call().kernel
    assert stored.decode().split("\\n")[0] == backend.key(fresh)
    assert found.kernel.written == fresh.written
    seen.add(function.__name__)
    return found

source_keys.source_key, source_keys.recall = watched_source_key, watched_recall
for op in ("attention", "decode_partials", "merge", "mask_blocks"):
    for result in check.results(check.cases(f"{op} float32")[:6], "cpu"):
        assert not result.problem, result.problem
print(*sorted(seen))
"""


def test_every_registered_kernel_has_a_source_key(folder: Path) -> None:
    """Its file holds the key of what the front end makes. Run twice: compiled, and from disk."""
    for _ in range(2):
        environment = {**os.environ, "PYTHONPATH": SOURCES}
        run = subprocess.run([sys.executable, "-c", EVERY], env=environment, capture_output=True, text=True)
        assert not run.stderr
        assert run.stdout.split() == ["attention", "mask_blocks", "merge"]


def test_recalled_call_loads_no_front_end(folder: Path) -> None:
    code = "import sys, numpy as np, module_of_keys as m\n"
    code += "m.scale(np.zeros(9, np.float32), np.zeros(9, np.float32)); print('monotile.frontend.build' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{folder}"}
    found = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert not run.stderr
        found.append(run.stdout.strip())
    assert found == ["True", "False"]
