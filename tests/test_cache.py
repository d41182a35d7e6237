"""The on-disk cache: damaged files count as absent, and other users' files are not read."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from monotile import errors, runtime
from monotile.runtime import cache, cache_limit

KEY = cache.fingerprint("a key")
PAYLOAD = bytes(range(256)) * 40
SOURCES = str(Path(cache.__file__).parents[2])
has_modes = pytest.mark.skipif(os.name != "posix", reason="this system's files have no owner and mode")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "kernels"
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(path))
    cache._warn_refused.cache_clear()
    yield path
    if path.is_dir():
        path.chmod(0o700)  # so that pytest can remove it


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_stored_payload_comes_back() -> None:
    assert cache.load(KEY, "o") is None
    cache.store(KEY, "o", PAYLOAD)
    assert cache.load(KEY, "o") == PAYLOAD
    assert cache.load(KEY, "ptx") is None
    cache.store(KEY, "o", b"")
    assert cache.load(KEY, "o") == b""


@has_modes
def test_directory_and_files_are_private(folder: Path) -> None:
    cache.store(KEY, "o", PAYLOAD)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_default_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOTILE_CACHE_DIR")
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.directory() == tmp_path / ".cache/monotile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg/monotile"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.directory() == tmp_path / "Library/Caches/monotile"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert cache.directory() == tmp_path / "Local/monotile"
    monkeypatch.delenv("LOCALAPPDATA")
    assert cache.directory() == tmp_path / "AppData/Local/monotile"


def test_a_file_that_another_process_reads_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to replace a file that is open elsewhere: the old one stays, and nothing is left behind."""
    cache.store(KEY, "o", b"old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Access is denied")

    monkeypatch.setattr(os, "replace", refuse)
    cache.store(KEY, "o", b"new")
    assert cache.load(KEY, "o") == b"old"
    only_file(folder)


def test_every_truncation_is_absent(folder: Path) -> None:
    cache.store(KEY, "o", b"payload")
    path = only_file(folder)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert cache.load(KEY, "o") is None
    path.write_bytes(whole + b"x")
    assert cache.load(KEY, "o") is None


def test_every_changed_byte_is_absent(folder: Path) -> None:
    cache.store(KEY, "o", b"payload")
    path = only_file(folder)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        assert cache.load(KEY, "o") is None
    path.write_bytes(whole)
    assert cache.load(KEY, "o") == b"payload"


def test_foreign_things_are_absent_and_replaced(folder: Path) -> None:
    cache.store(KEY, "o", PAYLOAD)
    path = only_file(folder)
    path.write_bytes(b"\x7fELF not ours")
    assert cache.load(KEY, "o") is None
    cache.store(KEY, "o", PAYLOAD)
    assert cache.load(KEY, "o") == PAYLOAD
    path.unlink()
    path.mkdir()
    assert cache.load(KEY, "o") is None
    cache.store(KEY, "o", PAYLOAD)
    assert list(folder.iterdir()) == [path], "a failed store must not leave its temporary file"


@has_modes
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_directory_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"other users may write to it.*chmod go-w"):
        cache.store(KEY, "o", PAYLOAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning is given once
        assert cache.load(KEY, "o") == PAYLOAD
        used = cache.directory()
    assert not list(folder.iterdir())
    assert used != folder
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    (used / f"{KEY}.o").unlink()


@has_modes
def test_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert cache.directory() != folder


@has_modes
def test_temporary_directory_goes_with_its_process(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    code = (
        "import os, warnings; warnings.simplefilter('ignore')\n"
        "from monotile.runtime import cache\n"
        "print(cache.directory(), flush=True)\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0); assert cache.directory().exists()\n"
    )
    result = subprocess.run(command(code), env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert not Path(result.stdout.strip()).exists()


def test_unwritable_directory_is_no_error(folder: Path) -> None:
    cache.store(KEY, "o", PAYLOAD)
    folder.chmod(0o500)
    cache.store("other", "o", PAYLOAD)  # root may write all the same; nobody may fail
    assert cache.load(KEY, "o") == PAYLOAD


def test_full_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    cache.store(KEY, "o", PAYLOAD)
    assert cache.load(KEY, "o") is None
    assert not list(folder.iterdir())


def test_directory_that_cannot_be_made_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    cache.store(KEY, "o", PAYLOAD)
    assert cache.load(KEY, "o") == PAYLOAD
    (cache.directory() / f"{KEY}.o").unlink()


def test_directory_removed_while_running(folder: Path) -> None:
    cache.store(KEY, "o", PAYLOAD)
    shutil.rmtree(folder)
    assert cache.load(KEY, "o") is None
    cache.store(KEY, "o", PAYLOAD)
    assert cache.load(KEY, "o") == PAYLOAD


def test_many_processes_write_one_key(folder: Path) -> None:
    """Windows does not open a file while it is replaced: then it counts as absent."""
    code = (
        "import sys; from monotile.runtime import cache\n"
        "seen = 0\n"
        "for i in range(150):\n"
        "    cache.store('shared', 'o', bytes([i % 251]) * (1 + 997 * int(sys.argv[1])))\n"
        "    found = cache.load('shared', 'o')\n"
        "    if found is None and sys.platform == 'win32': continue\n"
        "    assert found is not None and len(set(found)) == 1 and len(found) % 997 == 1\n"
    )
    writers = [subprocess.Popen([*command(code), str(i)], env=environment()) for i in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    assert [path.name for path in folder.iterdir()] == ["shared.o"]


def test_fingerprint_tells_parts_apart() -> None:
    assert cache.fingerprint("ab", "c") != cache.fingerprint("a", "bc")
    assert cache.fingerprint("ab") != cache.fingerprint("ab", "")
    assert cache.fingerprint("é") == cache.fingerprint("é".encode())
    assert len(cache.fingerprint()) == 64


def loaded_later(patch: pytest.MonkeyPatch, *, seconds: float) -> str:
    """Return the fingerprint that a process finds which loads monotile some seconds from now."""
    patch.setattr(runtime, "LOADING_SINCE_NS", time.time_ns() + int(seconds * 1e9))
    cache._compiler.cache_clear()
    return cache.compiler_fingerprint()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of two files in place of monotile's own."""
    path = tmp_path / "package"
    path.mkdir()
    (path / "one.py").write_text("x = 1\n")
    (path / "two.py").write_text("y = 1\n")
    monkeypatch.setattr(cache, "__file__", str(path / "runtime" / "cache.py"))
    yield path
    cache._compiler.cache_clear()


def test_compiler_fingerprint_covers_the_whole_package() -> None:
    """An edit in any folder of the compiler must not find what was compiled before it."""
    package = Path(SOURCES) / "monotile"
    found = {Path(path) for path, _ in cache._files(cache._package_folder(), (".py",))}
    assert found == set(package.rglob("*.py"))


def test_compiler_fingerprint_follows_the_source(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = partial(loaded_later, monkeypatch, seconds=5)
    first = loaded()
    assert loaded() == first
    (package / "one.py").write_text("x = 2\n")
    second = loaded()
    (package / "sub").mkdir()
    (package / "one.py").rename(package / "sub/one.py")
    third = loaded()
    (package / "sub/three.py").touch()
    assert len({first, second, third, loaded()}) == 4


def test_unchanged_source_is_not_read_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded_later(monkeypatch, seconds=5)
    monkeypatch.setattr(cache, "_source_fingerprint", lambda: pytest.fail("read again"))
    assert loaded_later(monkeypatch, seconds=6) == first


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say when a file's times were set")
def test_edit_that_hides_is_noticed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same length, same time of the last change: an edit whose time stamp was put back."""
    first = loaded_later(monkeypatch, seconds=5)
    before = (package / "one.py").stat()
    time.sleep(0.02)  # time stamps step by up to 10 ms
    (package / "one.py").write_text("x = 2\n")
    os.utime(package / "one.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (package / "one.py").stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert loaded_later(monkeypatch, seconds=5) != first


def test_exchanged_files_are_noticed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded_later(monkeypatch, seconds=5)
    (package / "one.py").rename(package / "three.py")
    (package / "two.py").rename(package / "one.py")
    (package / "three.py").rename(package / "two.py")
    assert loaded_later(monkeypatch, seconds=5) != first


@pytest.mark.parametrize("seconds", [-5.0, 0.0])
def test_source_changed_under_a_process_is_shared_with_none(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Either version may be running: nothing is loaded from the cache and nothing is stored."""
    assert len({loaded_later(monkeypatch, seconds=seconds) for _ in range(3)}) == 3
    cache.store_compiled(KEY, "o", PAYLOAD)
    assert not folder.exists() or not list(folder.iterdir())


def test_nothing_is_kept_after_an_edit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_later(monkeypatch, seconds=5)
    cache.store_compiled(KEY, "o", PAYLOAD)
    assert cache.load(KEY, "o") == PAYLOAD
    (package / "one.py").write_text("x = 3\n")
    cache.store_compiled("later", "o", PAYLOAD)
    assert cache.load("later", "o") is None


def test_damaged_record_of_the_source_is_made_again(
    package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded_later(monkeypatch, seconds=5)
    record = only_file(folder)
    record.write_bytes(record.read_bytes()[:-1] + b"?")
    assert loaded_later(monkeypatch, seconds=5) == first
    assert record.read_bytes().endswith(first.encode())


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCES}


# ---- its size --------------------------------------------------------------------------------------------------------


def aged(folder: Path, name: str, size: int, hours: float) -> Path:
    path = folder / name
    path.write_bytes(bytes(size))
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))
    return path


def test_what_was_used_longest_ago_is_removed_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit; not files that are being written, those of the last minute, or measurements."""
    (cache.directory() / "nvidia").mkdir()
    tuned = cache.directory() / "tuned"
    tuned.mkdir()
    assert cache_limit.limit(str(folder)) == cache_limit.DEFAULT_LIMIT
    old, older = aged(folder, "b.cpu", 400, 2), aged(folder / "nvidia", "a.py", 400, 3)
    measured, written = aged(tuned, "gpu.json", 5000, 99), aged(folder, ".new-x", 5000, 2)
    abandoned = aged(folder, ".new-y", 10, 48)
    used = folder / f"{KEY}.o"
    cache.store(KEY, "o", bytes(100))
    os.utime(used, (0, 0))
    assert cache.load(KEY, "o") == bytes(100) and time.time() - used.stat().st_mtime < 60  # a read counts as use
    assert cache_limit.set_limit(str(folder), "0.75 KiB") == 768 == cache_limit.limit(str(folder))
    assert [path.exists() for path in (older, old, used)] == [False, True, True]
    assert [path.exists() for path in (measured, written, abandoned)] == [True, True, False]
    monkeypatch.setattr(cache, "_until_next_look", 0)
    cache_limit.set_limit(str(folder), "200")
    assert not old.exists() and used.exists()  # used within a minute, though beyond the limit
    with pytest.raises(errors.BadOption, match="a limit is a size such as 500M or 2GiB, found 'much'"):
        cache_limit.set_limit(str(folder), "much")


def test_processes_store_and_remove_at_once(folder: Path) -> None:
    """Each reads back what it stored, or nothing; none fails."""
    code = (
        "import os, sys\nfrom monotile.runtime import cache, cache_limit\ncache_limit.RECENT_S = -1\n"
        "for n in range(60):\n"
        "    key = cache.fingerprint(sys.argv[1], str(n % 7))\n"
        "    cache._until_next_look = 0\n"
        "    cache.store(key, 'o', bytes(1000))\n"
        "    assert cache.load(key, 'o') in (None, bytes(1000))\n"
    )
    cache.directory()
    cache_limit.set_limit(str(folder), "5K")
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    processes = [subprocess.Popen([*command, str(n % 2)], env=environment, stderr=subprocess.PIPE) for n in range(3)]
    for process in processes:
        assert process.communicate()[1] == b"" and process.returncode == 0
    cache_limit.evict(str(folder))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8000


def test_clear_keeps_measurements_and_the_limit(folder: Path) -> None:
    cache.store(KEY, "o", PAYLOAD)
    cache_limit.set_limit(str(folder), "3M")
    (folder / "tuned").mkdir()
    measured = aged(folder / "tuned", "gpu.json", 10, 1)
    assert cache_limit.clear(str(folder)) == 1 and cache_limit.files(str(folder)) == []
    assert measured.exists() and cache_limit.limit(str(folder)) == 3 << 20
