"""The on-disk cache of compiled kernels: files that are either whole and ours, or as good as absent."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

MAGIC = b"monotile-cache-1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


def directory() -> Path:
    """Where the files lie; made on first use, readable by this user alone.

    Cached objects are machine code that will be run, so a directory in which somebody else could put files is
    refused, and this process uses a temporary one of its own instead.
    """
    path = _chosen_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError:
        return _private_directory()
    complaint = _complaint(found)
    if complaint:
        _warn_refused(path, complaint)
        return _private_directory()
    return path


def load(key: str, kind: str) -> bytes | None:
    """The payload stored under this key, or None if there is none or the file is damaged."""
    try:
        data = (directory() / f"{key}.{kind}").read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + _DIGEST_BYTES
    payload = data[start:]
    if data[:start] != MAGIC + hashlib.sha256(payload).digest():
        return None
    return payload


def store(key: str, kind: str, payload: bytes) -> None:
    """Keep a payload. A disk that is full or read-only costs a later rebuild, never an error."""
    with contextlib.suppress(OSError):
        folder = directory()
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=folder)  # mode 0600
        try:
            with open(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, folder / f"{key}.{kind}")  # readers see the old file or the new one, never a part
        except BaseException:
            os.unlink(temporary)
            raise


def fingerprint(*parts: str | bytes) -> str:
    """A name for these parts in this order; no two different lists of parts share one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@cache
def compiler_fingerprint() -> str:
    """Names the monotile source that is running, so that an edited compiler never reads what the old one made."""
    package = Path(__file__).parent
    sources = sorted(package.rglob("*.py"))
    return fingerprint(*(part for path in sources for part in (str(path.relative_to(package)), path.read_bytes())))


def _chosen_directory() -> Path:
    chosen = os.environ.get("MONOTILE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.path.expanduser(base)).absolute() / "monotile"


def _complaint(found: os.stat_result) -> str | None:
    """Why files in this directory cannot be trusted, if they cannot."""
    if os.name != "posix":
        return None
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return None


@cache
def _warn_refused(path: Path, complaint: str) -> None:
    warnings.warn(
        f"monotile does not use the cache directory {path}: {complaint}, and its files are run as machine code. "
        f"Kernels are compiled anew in every process until you run `chmod go-w {path}` on a directory of your own, "
        "or name another one in MONOTILE_CACHE_DIR.",
        RuntimeWarning,
        stacklevel=4,
    )


@cache
def _private_directory() -> Path:
    """A directory for this process (and its forks), removed when it ends."""
    path = Path(tempfile.mkdtemp(prefix="monotile-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path
