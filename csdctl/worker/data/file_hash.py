"""The SHA-256 of data files, computed again only when a file may have changed.

Hashing reads whole files, so hashes are remembered with the state of the files, in a file that only this user
can write. A disk may damage a file that nobody changes. So checksums of its chunks are remembered, too, with
which readers compare what they get.
"""

import hashlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.process.files import open_private
from csdctl.worker.protocol.durable_files import save_text
from csdctl.worker.protocol.file_state import file_state

REMEMBERED = Path(".csdctl/hashes.json")
"""Relative to the session's home; nothing is remembered where csdctl has no directory."""
MAX_ENTRIES, MAX_BYTES = 1000, 64 << 20
MIN_CHUNK_BYTES, MAX_CHUNKS = 1 << 20, 1 << 16
TICK_S = 0.05
"""Two changes within one tick of the clock may get the same ctime: longer than any kernel's tick."""
COARSE_TICK_S = 2.0
"""On file systems that store whole seconds."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file to read. Raises OSError if it is missing, and ValueError if it is no regular file."""
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise ValueError("not a regular file")
    return file


def chunk_bytes(file_bytes: int) -> int:
    """Return the bytes of each chunk of a file but the last, which may have fewer."""
    return max(MIN_CHUNK_BYTES, -(-file_bytes // MAX_CHUNKS))


def hash_file(
    file: BufferedReader, name: str, remembered: Path = REMEMBERED, *, is_fresh: bool = False
) -> tuple[str, list[int]]:
    """Return the SHA-256 of an open file, and the CRC-32 of each chunk. Raises WorkerError if it changes.

    `is_fresh`: what is remembered does not count.
    """
    state = file_state(os.fstat(file.fileno()))
    size = chunk_bytes(state[2])

    def compute() -> tuple[str, list[int]]:
        file.seek(0)
        digest, checksums = hashlib.sha256(), []
        while chunk := file.read(size):
            digest.update(chunk)
            checksums.append(zlib.crc32(chunk))
        if file_state(os.fstat(file.fileno())) != state:
            raise WorkerError(f"{name} was changed while it was read", remedy="run `csdctl prepare`")
        return digest.hexdigest(), checksums

    key = f"{state[0]}:{state[1]}"
    hashes: tuple[str, list[int]] = remember(
        key, (*state[2:], size), state[-1], compute, remembered, is_fresh=is_fresh
    )
    return hashes


def remember(
    key: str,
    state: Sequence[Any],
    ctime_ns: int,
    compute: Callable[[], Any],
    remembered: Path = REMEMBERED,
    *,
    is_fresh: bool = False,
) -> Any:
    """Return what `compute` returned when `key` had this `state`, or returns now. `ctime_ns`: the newest."""
    entries = _load(remembered)
    entry = entries.pop(key, None)
    if entry and entry[:-1] == [*state] and not is_fresh:
        return entry[-1]
    tick_s = TICK_S if ctime_ns % 1_000_000_000 else COARSE_TICK_S
    time.sleep(min(max(0.0, tick_s - (time.time() - ctime_ns / 1e9)), tick_s))
    result = compute()
    entries = {**dict(list(entries.items())[1 - MAX_ENTRIES :]), key: [*state, result]}
    with suppress(OSError):  # without directory, space or permission it is computed again next time
        if remembered.parent.is_dir():
            save_text(remembered, json.dumps(entries))
    return result


def check_stored(path: str) -> None:
    """Raise WorkerError if a file of the store differs from the hash with which its name begins."""
    stated = re.match(r"[0-9a-f]{64}", Path(path).name)
    if stated is None:
        return
    try:
        with open_regular(path) as file:
            sha256, _ = hash_file(file, path)
    except (OSError, ValueError) as error:
        raise WorkerError(f"{path} cannot be read: {error}", remedy="run `csdctl deploy`") from None
    if sha256 != stated[0]:
        problem = f"{path} is not what csdctl sent: expected SHA-256 {stated[0]}, found {sha256}"
        raise WorkerError(problem, remedy="run `csdctl deploy`, and check who can write there")


def _load(path: Path) -> dict[str, list[Any]]:
    """Return the remembered hashes. None if another user could have written them, or the file is damaged."""
    try:
        with os.fdopen(open_private(path), "rb") as file:
            content = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {key: entry for key, entry in entries if isinstance(entry, list) and entry}
