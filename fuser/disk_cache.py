"""What is kept between processes: compiled kernels and tunings, checked before they are used.

An entry is one file of the cache folder: its payload, which tools such as ``objdump`` and ``cuobjdump`` can read as it
is, and a footer with a digest of its name and payload. Whatever is wrong with a file, it is made anew and replaced;
whatever is wrong with the folder, the call goes on without it. Both are said once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from fuser import counters, file_lock
from fuser.config import config
from fuser.errors import CacheError, CacheWarning, shows_users_frames
from fuser.process import ignoring, is_of_signal_handler

__all__ = [
    "CacheKey",
    "cache_folder",
    "clear_cache",
    "list_entries",
    "load_cache",
    "load_or_make",
    "read",
    "save_cache",
    "scratch_folder",
    "write",
]

K = TypeVar("K")

FOLDER, LOCK, TEMPORARY, SCRATCH = "kernels", "lock", "tmp-", "fuser-scratch-"
ENTRY = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")
# The number is the format's.
MAGIC = b"fuser\0\0\1"
FOOTER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
# A file that save_cache wrote: this; for each entry a name, the size of its payload and that; a digest of it all.
SAVED = b"fuser kernels 2\n"
HEAD = struct.Struct("<64sQ")
# No kernel comes near it, and a sparse file must not fill the memory.
LARGEST_BYTES = 1 << 28
HOUR_S = 3600.0

# What load_cache took from files, by CacheKey.wanted.
_shipped: dict[str, bytes] = {}
# What this process used, by CacheKey.wanted: the file that has it, or itself where none has.
_used: dict[str, Path | bytes] = {}
# What a thread makes just now: a signal handler or __del__ that runs in it may want the same.
_making: set[tuple[int, str]] = set()
_bytes_written = 0


class CacheKey(NamedTuple):
    """What an entry is made from, as two digests."""

    # All that decides the payload, but for who makes it: text, options, target, fuser's version.
    wanted: str
    # Who makes it: a compiler, its version and flags. None where there is none: then anybody's is taken.
    maker: str | None

    @classmethod
    def build(cls, wanted: Sequence[str], maker: Sequence[str] | None) -> CacheKey:
        """Return the key for texts that say what is wanted and who makes it."""
        return cls(_digest(wanted), None if maker is None else _digest(maker)[:16])

    @property
    def number(self) -> int:
        """Return which byte of the lock file stands for what is wanted."""
        return int(self.wanted[:15], 16)


def load_or_make(key: CacheKey, make: Callable[[], bytes], load: Callable[[bytes], K]) -> K:
    """Return what ``load`` makes of an entry: one from the cache, or one made now and kept there.

    One process makes it; others that want the same wait for that, ``config.lock_timeout`` seconds at most.

    Raises:
        Exception: what ``make`` raised, or ``load`` of what was just made. An entry that was found and cannot be
            loaded is made anew.
    """
    found = _find(key, load)
    if found is None:
        with _turn(key):
            found = _find(key, load)
            if found is None:
                payload = make()
                made = load(payload)
                write(key, payload)
                return made
    counters.count("cache_hits")
    return found


def read(key: CacheKey) -> bytes | None:
    """Return the payload of an entry that passes every check; None if there is none.

    Where nothing can be made (there is no compiler, or ``config.no_compile`` is set), whoever made it will do.
    """
    shipped = _shipped.get(key.wanted)
    if shipped is not None:
        _used[key.wanted] = shipped
        return shipped
    folder = cache_folder()
    for entry in () if folder is None else _entries_for(folder, key):
        try:
            with ignoring(FileNotFoundError, NotADirectoryError):
                payload = _read_entry(entry)
                _used[key.wanted] = entry
                return payload
        except (OSError, CacheError) as error:
            _warn("an entry of the kernel cache was not used", error, f"{entry}; it will be made anew")
    return None


def write(key: CacheKey, payload: bytes) -> None:
    """Keep an entry in place of what is there under its name. A cache that cannot be written is skipped."""
    _used[key.wanted] = payload
    folder = cache_folder()
    if folder is None or key.maker is None:
        return
    entry = folder / f"{key.wanted}-{key.maker}"
    try:
        _make_folder(folder)
        if entry.is_dir() and not entry.is_symlink():
            entry.replace(_temporary(folder))
        _replace(entry, payload + _footer(entry.name, payload), 0o600)
        _used[key.wanted] = entry
    except OSError as error:
        _warn(
            "kernels are not kept on disk",
            error,
            f"{folder} (set FUSER_CACHE_DIR to another folder, or FUSER_DISK_CACHE=0)",
        )
        return
    with ignoring(OSError):
        _tidy(folder, len(payload))


@shows_users_frames
def save_cache(path: str | os.PathLike[str]) -> int:
    """Write the kernels that this process compiled or loaded, and their tunings, to one file, to ship with a model.

    They serve processes with the same version of fuser and, for CPU kernels, the same features of the processor and
    the same C library; CUDA kernels serve GPUs of the same architecture. A compiler is not needed there.

    Args:
        path: the file. It is replaced in one step.

    Returns:
        The number of entries written.

    Raises:
        CacheError: the cache has lost one of them: it was emptied, or damaged.
        OSError: the file cannot be written.
    """
    used, parts = sorted(_used.items()), [SAVED]
    for wanted, entry in used:
        try:
            payload = entry if isinstance(entry, bytes) else _read_entry(entry)
        except (OSError, CacheError) as error:
            if is_of_signal_handler(error):
                raise
            raise CacheError(f"a kernel of this process is not in the cache any more: {error}") from error
        parts += (HEAD.pack(wanted.encode(), len(payload)), payload)
    saved = b"".join(parts)
    try:
        _replace(Path(path), saved + hashlib.sha256(saved).digest(), None)
    except OSError as error:
        if is_of_signal_handler(error):
            raise
        # It is about a file beside it, which the caller did not name.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return len(used)


@shows_users_frames
def load_cache(path: str | os.PathLike[str]) -> int:
    """Take the kernels of a file that ``save_cache`` wrote: this process uses them instead of compiling.

    They are machine code, which runs when its functor is called: load only files that you trust as you trust the
    program itself. The digests in the file guard against damage, not against whoever wrote it. Nothing is kept on
    disk: another process loads the file itself.

    Args:
        path: the file.

    Returns:
        The number of entries taken.

    Raises:
        CacheError: the file is damaged, or is not one of ``save_cache``'s; nothing of it is used.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        found = dict(_parse_saved(data))
    except (CacheError, struct.error, UnicodeDecodeError) as error:
        raise CacheError(f"{os.fspath(path)} is not a file of kernels that can be used: {error}") from None
    _shipped.update(found)
    return len(found)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder for a ``with`` block, which only this user can read."""
    # Not TemporaryDirectory: a fork of this process would remove it when it exits.
    # Absolute: what it is given to must not take its name for an option.
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH)).absolute()
    try:
        yield folder
    finally:
        with ignoring(OSError):
            shutil.rmtree(folder)


def _digest(texts: Sequence[str]) -> str:
    # repr tells where a text ends, and takes lone surrogates.
    return hashlib.sha256(repr(tuple(texts)).encode()).hexdigest()


def _footer(name: str, payload: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + payload).digest()


def _unpack(name: str, data: bytes) -> bytes:
    payload = data[:-FOOTER_BYTES]
    if data[-FOOTER_BYTES:] != _footer(name, payload):
        raise CacheError("it is damaged")
    return payload


def _parse_saved(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what each entry of a saved file is for, and its payload."""
    if not data.startswith(SAVED):
        raise CacheError("it does not begin as one")
    end_of_all = len(data) - hashlib.sha256().digest_size
    if hashlib.sha256(data[:end_of_all]).digest() != data[end_of_all:]:
        raise CacheError("it is damaged")
    begin = len(SAVED)
    while begin < end_of_all:
        name, size = HEAD.unpack_from(data, begin)
        end = begin + HEAD.size + size
        yield name.decode(), data[begin + HEAD.size : end]
        begin = end


def _find(key: CacheKey, load: Callable[[bytes], K]) -> K | None:
    payload = read(key)
    if payload is None:
        return None
    try:
        return load(payload)
    except Exception as error:
        # It is made for another driver, or needs a library that is gone.
        _warn("an entry of the kernel cache could not be loaded", error, "it will be made anew")
        return None


# ---- files ----


def cache_folder() -> Path | None:
    """Return the folder of entries, which need not exist; None to do without."""
    if not config.disk_cache:
        return None
    try:
        return Path(config.cache_dir or _user_folder()).expanduser().absolute() / FOLDER
    except (OSError, RuntimeError) as error:
        # No home folder, or a path that is relative to a folder that is gone.
        _warn("kernels are not kept on disk", error, "set FUSER_CACHE_DIR to a folder")
        return None


def _user_folder() -> str:
    import platformdirs  # noqa: PLC0415 - only needed here

    return platformdirs.user_cache_dir("fuser")


def list_entries() -> list[tuple[Path, os.stat_result]]:
    """Return the files of all entries, and what the file system says of them; their time is that of the last use."""
    folder = cache_folder()
    if folder is None or not folder.is_dir():
        return []
    return [(path, status) for path, status in _list(folder) if ENTRY.fullmatch(path.name)]


def clear_cache() -> int:
    """Remove all entries; return how many there were. Kernels that are loaded stay.

    Raises:
        OSError: one cannot be removed, as in a folder that is read-only.
    """
    entries = list_entries()
    for path, _ in entries:
        # Others remove files too.
        with ignoring(FileNotFoundError):
            _delete(path)
    return len(entries)


def _entries_for(folder: Path, key: CacheKey) -> Iterator[Path]:
    if key.maker is not None:
        yield folder / f"{key.wanted}-{key.maker}"
    if key.maker is None or config.no_compile:
        with ignoring(OSError):
            yield from sorted(folder.glob(f"{key.wanted}-*"))


def _read_entry(entry: Path) -> bytes:
    """Return the payload.

    Raises:
        OSError: there is no such file, or it cannot be read.
        CacheError: it is not to be trusted, or damaged; says why.
    """
    # Opened once and checked by its descriptor: what a name stands for may change between two looks at it. Opening
    # must not wait for the other end of a FIFO.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(entry, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CacheError("it is a link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError("it is not a regular file")
        if status.st_uid not in {os.geteuid(), 0}:
            raise CacheError("it belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheError("other users may write to it")
        if status.st_size > LARGEST_BYTES:
            raise CacheError("it is too large")
        # Read, not mapped: a mapped file that somebody truncates kills the process.
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            payload = _unpack(entry.name, file.read(status.st_size))
        if _is_apart(status.st_mtime, HOUR_S):
            # What was read last stays longest. A cache of root's, or a read-only one, keeps its times.
            with ignoring(OSError):
                os.utime(descriptor)
        return payload
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        with ignoring(FileExistsError):
            folder.mkdir(0o700)
            # Whatever the umask.
            folder.chmod(0o700)


def _temporary(folder: Path) -> Path:
    return folder / f"{TEMPORARY}{os.urandom(8).hex()}"


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    """Write a file in one step, so that readers see all of it or none; ``mode`` None is the user's default."""
    temporary = _temporary(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _tidy(folder: Path, written: int) -> None:
    """Now and then, remove what has been unused longest beyond ``config.cache_size``, and what the dead left behind."""
    global _bytes_written  # noqa: PLW0603 - one count per process
    _bytes_written += written
    share = config.cache_size // 16
    # Its time says when somebody tidied last.
    os.close(_open_lock(folder))
    lock = folder / LOCK
    if _bytes_written <= share and not _is_apart(lock.stat().st_mtime, HOUR_S):
        return
    os.utime(lock)
    _bytes_written, entries = 0, []
    for path, status in _list(folder):
        if ENTRY.fullmatch(path.name):
            entries.append((status.st_mtime, status.st_size, path))
        elif path.name.startswith(TEMPORARY) and _is_apart(status.st_mtime, HOUR_S):
            _remove(path)
    excess = sum(size for _, size, _ in entries) - (config.cache_size - share)
    for _, size, path in sorted(entries):
        if excess <= 0:
            break
        _remove(path)
        excess -= size
    for path, status in _list(Path(tempfile.gettempdir())):
        is_ours = path.name.startswith(SCRATCH) and status.st_uid == os.geteuid()
        if is_ours and _is_apart(status.st_mtime, HOUR_S + config.compile_timeout):
            _remove(path)


def _is_apart(time_s: float, seconds: float) -> bool:
    """Whether it is longer ago, or as far ahead: a clock that was wrong must not keep files, nor put work off."""
    return abs(time.time() - time_s) > seconds


def _list(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(folder) as items:
        for item in items:
            # Others remove files too.
            with ignoring(OSError):
                yield Path(item.path), item.stat(follow_symlinks=False)


def _remove(path: Path) -> None:
    with ignoring(OSError):
        _delete(path)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# ---- locks ----


@contextmanager
def _turn(key: CacheKey) -> Iterator[None]:
    """Wait until nobody else makes this entry, for ``config.lock_timeout`` seconds at most.

    The lock saves work and guards nothing: without it, two processes may make the same entry.
    """
    me, folder = (threading.get_ident(), key.wanted), cache_folder()
    if folder is None or me in _making:
        yield
        return
    _making.add(me)
    lock = None
    try:
        with ignoring(OSError):
            lock = _open_lock(folder)
        if lock is not None:
            file_lock.take(lock, key.number, config.lock_timeout)
        yield
    finally:
        _making.discard(me)
        if lock is not None:
            file_lock.release(lock, key.number)
            os.close(lock)


def _open_lock(folder: Path) -> int:
    _make_folder(folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    with ignoring(OSError):
        os.fchmod(lock, 0o600)
    return lock


def _warn(what: str, error: Exception, detail: str) -> None:
    if is_of_signal_handler(error):
        raise error
    # Once for each kind of fault, however many files have it.
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    counters.warn_once(f"{what}: {reason}", f"{what}: {reason}: {detail}", CacheWarning)
