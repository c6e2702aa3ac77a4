"""Python for nodes that have none: Debian's packages of the node's architecture, as one archive.

apt downloads and verifies them in a directory of its own, without root and without changing this host. The
archive has its own C library and loader, so that it runs on any system with a kernel of this century,
whatever its glibc is. Its path is fixed: the loader's path is written into the program.
"""

import gzip
import hashlib
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import CsdctlError
from csdctl.workflows.provision.machine import ARCHITECTURES, SENT_PYTHON
from csdctl.workflows.provision.programs import find_program, run_to_end

SUITE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRRORS = {
    SUITE: "http://deb.debian.org/debian",
    f"{SUITE}-security": "http://deb.debian.org/debian-security",
}
PACKAGES = (
    *(f"python{SENT_PYTHON}-minimal", f"libpython{SENT_PYTHON}-minimal", f"libpython{SENT_PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0"),
    *("liblzma5", "libuuid1", "libcrypt1", "libsqlite3-0"),
)
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_UNUSED = (
    *("usr/share", "usr/lib/*/gconv", "usr/lib/*/audit", "usr/lib/*/perl*", "etc", "sbin"),
    *(
        f"usr/lib/python{SENT_PYTHON}/{name}"
        for name in ("lib2to3", "test", "idlelib", "tkinter", "pydoc_data")
    ),
    *(f"usr/lib/python{SENT_PYTHON}/lib-dynload/{name}*" for name in ("nis", "readline", "_curses", "_dbm")),
)
APT_DEADLINE_S = 600.0
RULES_VERSION = 2


@dataclass(frozen=True)
class PythonArchive:
    """The archive, its id (part of its path on the nodes) and the packages in it."""

    path: Path
    id: str
    packages: dict[str, str]
    """The SHA-256 of each package, by file name."""
    unpacked_bytes: int


def python_directory(prefix: str, archive_id: str) -> str:
    """Return where the archive is unpacked on a node."""
    return f"{prefix}/python-{archive_id}"


def build_python(architecture: str, prefix: str, work: Path) -> PythonArchive:
    """Download, unpack and pack Python for nodes of `architecture` that install below `prefix`.

    Raises CsdctlError when a program is missing on this host, or apt fails.
    """
    for program, package in (("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("patchelf", "patchelf")):
        if not find_program(program):
            raise CsdctlError(
                f"{program} is needed to collect Python for nodes that have none, and is not installed",
                remedy=f"`apt-get install {package}`, or install Python {SENT_PYTHON} on those nodes",
            )
    packages = _download(ARCHITECTURES[architecture], work)
    digest = hashlib.sha256(f"{RULES_VERSION} {prefix} {sorted(packages.items())}".encode()).hexdigest()[:12]
    tree = work / "tree"
    for name in packages:
        _run(["dpkg-deb", "--extract", str(work / "debs" / name), str(tree)], "unpacking")
    _strip_tree(tree)
    _bind_to(tree, architecture, python_directory(prefix, digest))
    archive = work / "python.tar.gz"
    num_bytes = _pack(tree, archive)
    return PythonArchive(archive, digest, packages, num_bytes)


def _download(architecture: str, work: Path) -> dict[str, str]:
    root, debs = work / "apt", work / "debs"
    for part in ("state/lists/partial", "cache/archives/partial", "etc"):
        (root / part).mkdir(parents=True)
    debs.mkdir()
    (root / "status").touch()
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    sources = [f"deb {signed}{address} {suite} main\n" for suite, address in MIRRORS.items()]
    (root / "etc/sources.list").write_text("".join(sources))
    apt = ["apt-get", "--quiet", *_apt_options(root, architecture)]
    _run([*apt, "update"], "apt-get update")
    _run([*apt, "download", *PACKAGES], "apt-get download", cwd=debs)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(debs.glob("*.deb"))}


def _apt_options(root: Path, architecture: str) -> list[str]:
    nowhere = "/dev/null"
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures::": architecture,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::State": root / "state",
        "Dir::State::status": root / "status",
        "Dir::Cache": root / "cache",
        "Dir::Etc::sourcelist": root / "etc/sources.list",
        "Dir::Etc::sourceparts": nowhere,
        "Dir::Etc::preferences": nowhere,
        "Dir::Etc::preferencesparts": nowhere,
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _strip_tree(tree: Path) -> None:
    for pattern in _UNUSED:
        for path in tree.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _bind_to(tree: Path, architecture: str, directory: str) -> None:
    """Write the loader and the library paths of `directory` into the program.

    DT_RPATH, unlike DT_RUNPATH, also holds for the libraries that extension modules load.
    """
    libraries = f"usr/lib/{architecture}-linux-gnu"
    # All below sys.base_prefix: a sandboxed Python may read and start nothing else.
    for source in (tree / "lib" / f"{architecture}-linux-gnu").iterdir():
        source.replace(tree / libraries / source.name)
    for name in ("lib", "lib64"):
        shutil.rmtree(tree / name, ignore_errors=True)
    program = tree / f"usr/bin/python{SENT_PYTHON}"
    loader, paths = f"{directory}/{libraries}/{_LOADERS[architecture]}", f"{directory}/{libraries}"
    options = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", paths)
    _run([find_program("patchelf"), *options, str(program)], "patchelf")


def _pack(tree: Path, archive: Path) -> int:
    """Pack `tree`; the same content gives the same bytes. Return the size of its files."""

    def normalize(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mode &= 0o755
        return entry

    names = sorted(path.relative_to(tree) for path in tree.rglob("*"))
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in names:
            tar.add(tree / name, str(name), recursive=False, filter=normalize)
    return sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())


def _run(command: Sequence[str], doing: str, cwd: Path | None = None) -> None:
    done = run_to_end(command, doing, APT_DEADLINE_S, cwd)
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CsdctlError(
            f"{doing} failed while collecting Python: {cause}", remedy="check the network of this host"
        )
