"""The on-disk cache of compiled kernels. A file that is damaged or may be someone else's counts as absent."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from .. import runtime

if TYPE_CHECKING:
    from hashlib import sha256
    from pathlib import Path
else:
    # hashlib loads OpenSSL, which takes longer than the rest of a call that finds its kernel in this cache.
    try:
        from _sha2 import sha256
    except ImportError:
        try:
            from _sha256 import sha256
        except ImportError:
            from hashlib import sha256

MARKED_S = 3600  # between two notes that a file was used
_until_next_look = 0  # bytes that this process may store before the size of the cache is looked at
MAGIC = b"monotile-cache-1\n"
_DIGEST_BYTES = 32


def directory() -> Path:
    """Return the cache directory, created on first use and readable by this user alone.

    Cached objects are machine code that will be run, so a directory in which another user could put files is refused,
    and this process uses a private temporary one instead.
    """
    from pathlib import Path

    return Path(_folder())


def load(key: str, kind: str) -> bytes | None:
    """Return the payload stored under this key, or None if there is none or the file is damaged."""
    try:
        path = os.path.join(_folder(), f"{key}.{kind}")
        with open(path, "rb") as file:
            mark_used(path, os.fstat(file.fileno()))
            data = file.read()
    except OSError:
        return None
    start = len(MAGIC) + _DIGEST_BYTES
    payload = data[start:]
    if data[:start] != MAGIC + sha256(payload).digest():
        return None
    return payload


def store(key: str, kind: str, payload: bytes) -> None:
    """Store a payload. A full or read-only disk costs a later rebuild, never an error."""
    import tempfile

    with contextlib.suppress(OSError):
        folder = _folder()
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)  # mode 0600
        try:
            with open(handle, "wb") as file:
                file.write(MAGIC + sha256(payload).digest() + payload)
            # Atomic: readers see the old file or the new one, never a part.
            os.replace(temporary, os.path.join(folder, f"{key}.{kind}"))
        except BaseException:
            os.unlink(temporary)
            raise
        _keep_to_limit(len(payload))


def mark_used(path: str, found: os.stat_result) -> None:
    """Set a file's time to now, unless that was done within the hour: what was used longest ago is removed first."""
    import time

    if time.time() - found.st_mtime > MARKED_S:
        with contextlib.suppress(OSError):
            os.utime(path)


def _keep_to_limit(stored: int) -> None:
    """Keep the cache to its limit, which is looked at when this process first stores something and then now and
    again: listing the files takes milliseconds."""
    global _until_next_look
    _until_next_look -= stored
    if _until_next_look <= 0:
        from . import cache_limit

        cache_limit.evict(_folder())
        _until_next_look = cache_limit.limit(_folder()) // 16


def fingerprint(*parts: str | bytes) -> str:
    """Hash a list of parts; different lists have different fingerprints."""
    digest = sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


# ---- the compiler's own source ---------------------------------------------------------------------------------------


def compiler_fingerprint() -> str:
    """Return a fingerprint of the running monotile source: an edited compiler never loads what the old one made."""
    return _compiler()[0]


def store_compiled(key: str, kind: str, payload: bytes) -> None:
    """Store a result of this compiler under a key made with its fingerprint, unless its source has changed since it was
    loaded: then the fingerprint may be of either version."""
    _, state = _compiler()
    if state is not None and files_state(_package_folder(), (".py",))[0] == state:
        store(key, kind, payload)


@cache
def _compiler() -> tuple[str, str | None]:
    """Return the fingerprint and the state of the source files it was taken from.

    If files changed while this process was loading them, the state is None and the fingerprint is shared with no other
    process. Reading all files would take 4 ms, so the fingerprint is kept on disk under their state;
    docs/internals/cpu.md says why that is safe.
    """
    return fingerprint_of_files(_package_folder(), (".py",), _source_fingerprint) or (fingerprint(os.urandom(32)), None)


def fingerprint_of_files(folder: str, endings: tuple[str, ...], compute: Callable[[], str]) -> tuple[str, str] | None:
    """Return a fingerprint that depends on files of a folder alone, and the state of these files. It is kept on disk
    under their state. None if one was changed since this process began to load them."""
    state, newest = files_state(folder, endings)
    # Time stamps step by up to 10 ms, and by up to 2 s in file systems that count whole seconds.
    step = 2_000_000_000 if newest % 1_000_000_000 == 0 else 100_000_000
    if newest + step >= runtime.LOADING_SINCE_NS:
        return None
    key = fingerprint("sources", state)
    kept = load(key, "sources")
    if kept is not None:
        return kept.decode(), state
    found = compute()
    if files_state(folder, endings)[0] != state:
        return None
    store(key, "sources", found.encode())
    return found, state


def _source_fingerprint() -> str:
    parts: list[str | bytes] = []
    for path, _ in _files(_package_folder(), (".py",)):
        with open(path, "rb") as file:
            parts += [os.path.relpath(path, _package_folder()), file.read()]
    return fingerprint(*parts)


def files_state(folder: str, endings: tuple[str, ...]) -> tuple[str, int]:
    """Return size, times and inode of every file with one of the endings, and the time of the latest change."""
    lines, newest = [], 0
    for path, found in _files(folder, endings):
        lines.append(f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino} {found.st_dev}")
        newest = max(newest, found.st_ctime_ns)
        if sys.platform == "win32":  # where the other one is the time of creation
            newest = max(newest, found.st_mtime_ns)
    return "\n".join(lines), newest


def _files(folder: str, endings: tuple[str, ...]) -> list[tuple[str, os.stat_result]]:
    found, folders = [], [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(endings):
                    found.append((entry.path, entry.stat()))
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return sorted(found)


def _package_folder() -> str:
    """Return the folder of the whole package, which is the parent of this module's own."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ---- the cache directory ---------------------------------------------------------------------------------------------


def _folder() -> str:
    path = _chosen_folder()
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except OSError:
        return _private_folder()
    reason = _why_untrusted(found)
    if reason:
        _warn_refused(path, reason)
        return _private_folder()
    return path


def _chosen_folder() -> str:
    chosen = os.environ.get("MONOTILE_CACHE_DIR")
    if not chosen:
        chosen = os.path.join(_users_caches(), "monotile")
    return os.path.abspath(os.path.expanduser(chosen))


def _users_caches() -> str:
    """Return the folder in which a system keeps this user's caches."""
    if sys.platform == "darwin":
        return "~/Library/Caches"
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    return os.environ.get("XDG_CACHE_HOME") or "~/.cache"


def _why_untrusted(found: os.stat_result) -> str | None:
    """Return why files in this directory cannot be trusted, or None if they can."""
    if os.name != "posix":
        return None
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return None


@cache
def _warn_refused(path: str, reason: str) -> None:
    import warnings

    warnings.warn(
        f"monotile does not use the cache directory {path}: {reason}, and its files are run as machine code. "
        f"Kernels are compiled anew in every process until you run `chmod go-w {path}` on a directory of your own, "
        "or name another one in MONOTILE_CACHE_DIR.",
        RuntimeWarning,
        stacklevel=4,
    )


@cache
def _private_folder() -> str:
    """Create a directory for this process and its forks, removed when the process ends."""
    import atexit
    import shutil
    import tempfile

    path = tempfile.mkdtemp(prefix="monotile-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path
