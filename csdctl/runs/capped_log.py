"""The log of a rank or of mpirun: a file with a limit, whatever is printed."""

import contextlib
import os
from pathlib import Path

from csdctl.notify import make_printable

MAX_LOG_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16


class CappedLog:
    """Appends lines to a file until it has `max_bytes`, then says so once, as its last line.

    Several writers of one file share the limit. A full disk must not end a run: what cannot be written is
    dropped.
    """

    def __init__(self, path: Path, name: str, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Open `path` for the output of `name`."""
        self._max_bytes = max_bytes
        self._last_line = f"… further output of {name} is dropped after {max_bytes >> 20} MiB\n".encode()
        self._file = None
        with contextlib.suppress(OSError):
            self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        """Write one line, printable; its end is added. Users read logs with `tail -f`."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            left = self._max_bytes - os.fstat(self._file.fileno()).st_size
            kept = line[:MAX_LINE_BYTES].replace(b"\0", b"").rstrip(b"\r\n")
            text = make_printable(kept.decode(errors="backslashreplace")).encode()[:MAX_LINE_BYTES] + b"\n"
            if left >= len(text):
                self._file.write(text)
            elif left > 0:  # with this, the file has more than the limit: nobody writes again
                self._file.write(text[: left - 1] + b"\n" + self._last_line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
