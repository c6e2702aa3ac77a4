"""A bundle: everything a kind of node needs, on the host, with the hash of every file.

.csdctl/provision/KIND/bundle.json       what it was made from, and every file's hash and size
.csdctl/provision/KIND/wheels/           trimmed wheels, and requirements.txt with their hashes
.csdctl/provision/KIND/python.tar.gz     Python itself, for nodes that have none
"""

import gzip
import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from csdctl.documents import build_atomically, check_values, load_json, load_text, save_json, save_text
from csdctl.errors import CsdctlError, InputError
from csdctl.notify import Say
from csdctl.reporting.numbers import format_bytes
from csdctl.shipping.payload import Payload, TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import hash_file, printable
from csdctl.workflows.provision.machine import ARCHITECTURES, SENT_PYTHON, Kind
from csdctl.workflows.provision.wheels import (
    TRIM_VERSION,
    download_wheels,
    find_program,
    run_program,
    select_locked,
    trim_wheel,
)

SCHEMA = "csdctl.bundle/1"
WHEELS = "csdctl-wheels"
"""Where the wheels lie on a node, relative to the home of its user."""

_SPARE = 1.3
"""For the byte code of the packages, and blocks that are not full."""

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
ARCHIVE_VERSION = 2


@dataclass(frozen=True)
class BundleFile:
    """A file of a bundle."""

    name: str
    sha256: str
    num_bytes: int
    unpacked_bytes: int = 0


@dataclass(frozen=True)
class Bundle:
    """The content of bundle.json, and the directory that it is in."""

    directory: Path
    kind: Kind
    recipe: str
    """The hash of everything that it is made from; its id on the nodes."""
    wheels: tuple[BundleFile, ...]
    python: BundleFile | None = None
    python_id: str = ""

    @property
    def files(self) -> tuple[BundleFile, ...]:
        """The wheels, and the archive of Python."""
        return (*self.wheels, self.python) if self.python else self.wheels

    @property
    def id(self) -> str:
        """A short name of its content."""
        content = " ".join([self.recipe, *(file.sha256 for file in self.files)])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def num_bytes(self) -> int:
        """The bytes that are sent to a node that has nothing yet."""
        return sum(file.num_bytes for file in self.files)

    @property
    def wheel_bytes(self) -> int:
        """The size of the wheels, which a node keeps in its user's home."""
        return sum(file.num_bytes for file in self.wheels)

    @property
    def unpacked_bytes(self) -> int:
        """The space that a node needs below the prefix."""
        return int(_SPARE * sum(file.unpacked_bytes for file in self.files))

    @property
    def needed_bytes(self) -> int:
        """The free space that a node needs, the wheels included."""
        return self.unpacked_bytes + self.num_bytes

    def pack(self) -> Payload:
        """Return the wheels as a payload; pip compares them with the hashes of requirements.txt there."""
        return pack_payload(trees=[read_tree(TreeRequest(self.directory / "wheels", WHEELS))])


def collect_bundle(kind: Kind, *, lock: Path, prefix: str, directory: Path, say: Say) -> Bundle:
    """Return the bundle of `kind` below `directory`; download what is needed if there is none yet.

    Raises InputError for an unusable lock file, CsdctlError when something cannot be downloaded.
    """
    recipe = _recipe(kind, select_locked(load_text(lock), kind), prefix)
    target = directory / kind.name
    known = load_bundle(target) if (target / "bundle.json").exists() else None
    if known and known.recipe == recipe:
        return known
    say(f"{kind.name}: collecting wheels{' and Python' if kind.sends_python else ''}")
    with build_atomically(target) as new:
        bundle = _build(kind, recipe, lock, prefix, new)
        content = {name: value for name, value in asdict(bundle).items() if name != "directory"}
        save_json(new / "bundle.json", {"schema": SCHEMA, **content})
    unpacked_bytes = sum(file.unpacked_bytes for file in bundle.files)
    say(f"{kind.name}: {format_bytes(bundle.num_bytes)} to send, {format_bytes(unpacked_bytes)} unpacked")
    return load_bundle(target)


def load_bundle(directory: Path) -> Bundle:
    """Read bundle.json; raises InputError when it is missing or not valid."""
    path = directory / "bundle.json"
    content = load_json(path)
    if not isinstance(content, dict) or content.pop("schema", "") != SCHEMA:
        raise InputError(
            f"{printable(str(path))} is not as it was collected",
            remedy=f"remove {printable(str(path.parent))} and run `csdctl provision --collect` again",
        )
    return check_values({"directory": str(directory), **content}, Bundle, str(path))


def _build(kind: Kind, recipe: str, lock: Path, prefix: str, new: Path) -> Bundle:
    wheels = new / "wheels"
    wheels.mkdir()
    with tempfile.TemporaryDirectory(dir=new.parent, prefix=".collecting-") as temporary:
        downloaded = download_wheels(lock, kind, Path(temporary))
        files = [_describe(wheels / path.name, trim_wheel(path, wheels / path.name)) for path in downloaded]
        save_text(wheels / "requirements.txt", _pin(files))
        (wheels / "requirements.txt").chmod(0o600)
        bundle = Bundle(new, kind, recipe, tuple(files))
        if not kind.sends_python:
            return bundle
        archive = new / "python.tar.gz"
        python_id, unpacked_bytes = build_python(
            kind.architecture, prefix, Path(temporary) / "python", archive
        )
    return replace(bundle, python=_describe(archive, unpacked_bytes), python_id=python_id)


def _describe(path: Path, unpacked_bytes: int) -> BundleFile:
    return BundleFile(path.name, hash_file(path), path.stat().st_size, unpacked_bytes)


def _pin(files: Sequence[BundleFile]) -> str:
    """Return a requirements file with the hashes of the trimmed wheels."""
    lines = []
    for file in files:
        name, version = file.name.split("-")[:2]
        lines.append(f"{name}=={version} --hash=sha256:{file.sha256}\n")
    return "".join(lines)


def _recipe(kind: Kind, locked: Sequence[str], prefix: str) -> str:
    versions = [TRIM_VERSION, *([ARCHIVE_VERSION, prefix] if kind.sends_python else [])]
    made_from = [SCHEMA, asdict(kind), sorted(locked), versions]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def python_directory(prefix: str, archive_id: str) -> str:
    """Return where the archive is unpacked on a node."""
    return f"{prefix}/python-{archive_id}"


def build_python(architecture: str, prefix: str, work: Path, archive: Path) -> tuple[str, int]:
    """Collect Python for nodes of `architecture` that install below `prefix`, as `archive`.

    It consists of Debian's packages of the node's architecture. apt downloads and verifies them in `work`,
    without root and without changing this host. The archive has its own C library and loader, so that it runs
    whatever the glibc of the node is. Its path is fixed: the loader's path is written into the program.

    Return its id and the bytes of the unpacked files. Raises CsdctlError when a program is missing on this
    host, or apt fails.
    """
    for program, package in (("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("patchelf", "patchelf")):
        if not find_program(program):
            raise CsdctlError(
                f"{program} is needed to collect Python for nodes that have none, and is not installed",
                remedy=f"`apt-get install {package}`, or install Python {SENT_PYTHON} on those nodes",
            )
    packages = _download(ARCHITECTURES[architecture], work)
    made_from = f"{ARCHIVE_VERSION} {prefix} {sorted(packages.items())}"
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:12]
    tree = work / "tree"
    for name in packages:
        _run(["dpkg-deb", "--extract", str(work / "debs" / name), str(tree)], "unpacking Python")
    _strip_tree(tree)
    _bind_to(tree, architecture, python_directory(prefix, digest))
    return digest, _pack(tree, archive)


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
    run_program(command, doing, APT_DEADLINE_S, "check the network of this host", cwd)
