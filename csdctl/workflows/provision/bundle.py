"""A bundle: everything a kind of node needs, on the host, with the hash of every file.

.csdctl/provision/KIND/bundle.json       what it was made from, and every file's hash and size
.csdctl/provision/KIND/wheels/           wheels, and requirements.txt with their hashes
.csdctl/provision/KIND/python.tar.gz     Python itself, for nodes that have none

Without `with_keras`, Keras and all of TensorFlow but its libraries are left out (docs/decisions/0053). The
same wheels and Debian packages give the same bytes.
"""

import fnmatch
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from csdctl.documents import check_values, load_json, load_text, save_json
from csdctl.errors import CsdctlError, InputError, option
from csdctl.fleet.requirements import find_program
from csdctl.notify import Say
from csdctl.reporting.numbers import format_bytes
from csdctl.shipping.store import hash_file
from csdctl.transport.commands import build_child_command
from csdctl.worker.protocol.durable_files import replacing_directory, save_text
from csdctl.worker.protocol.packages import TENSORFLOW
from csdctl.workflows.provision.machine import ARCHITECTURES, SENT_PYTHON, NodeKind

LOCK = Path(__file__).with_name("node.lock")
"""Every package that a rank imports, with the hashes of its wheels for all processors (`make lock`)."""

# Wheels built for glibc 2.28 or older. pip takes exactly the tags it is given.
_TAGS = (
    *(f"manylinux_2_{minor}" for minor in range(28, 4, -1)),
    *("manylinux2014", "manylinux2010", "manylinux1"),
)

UNUSED_PACKAGES = ("libclang", "grpcio")
"""TensorFlow names them, and needs them only for its microcontroller tools and its TPU profiler."""

_LIBRARIES = (
    "tensorflow/libtensorflow_framework.so.2",
    "tensorflow/libtensorflow_cc.so.2",
    "tensorflow/THIRD_PARTY_NOTICES.txt",
    *(f"*.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")),
)
"""Files of TensorFlow's wheel that are kept without Keras. They need only the libraries of C and C++."""
SCHEMA = "csdctl.bundle/1"
WHEELS = "csdctl-wheels"
"""Where the wheels are on a node, relative to the home of its user."""
SUITE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRRORS = {
    SUITE: "http://deb.debian.org/debian",
    f"{SUITE}-security": "http://deb.debian.org/debian-security",
}
DEBIAN_PACKAGES = (
    *(f"python{SENT_PYTHON}-minimal", f"libpython{SENT_PYTHON}-minimal", f"libpython{SENT_PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0"),
    *("liblzma5", "libuuid1", "libcrypt1", "libsqlite3-0"),
)
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
ARCHIVE_VERSION = 3


def run_program(
    command: Sequence[str], doing: str, *, remedy: str, deadline_s: float = 600.0, cwd: Path | None = None
) -> None:
    """Run a program that ends with csdctl. Raises CsdctlError after the deadline, or with its message."""
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


def select_locked(lock: str, kind: NodeKind, *, with_keras: bool) -> list[str]:
    """Return the lines of a lock for `kind`, without markers. Raises InputError for a missing hash. Pure."""
    from packaging.requirements import InvalidRequirement, Requirement

    environment = {
        "platform_machine": kind.architecture,
        "python_version": kind.python,
        "python_full_version": f"{kind.python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    unused = {*UNUSED_PACKAGES} if with_keras else {*UNUSED_PACKAGES, *_find_packages_of_keras(lock)}
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
            remedy = "write it with `uv pip compile --generate-hashes` or `pip-compile --generate-hashes`"
            raise InputError(f"the lock file has no hash for {requirement.name}", remedy=remedy)
        is_applied = requirement.marker is None or requirement.marker.evaluate(environment)
        if is_applied and requirement.name not in unused:
            selected.append(f"{requirement.name}{requirement.specifier} --hash={' '.join(hashes.split())}")
    return selected


def _find_packages_of_keras(lock: str) -> set[str]:
    """Return Keras and what only Keras and TensorFlow need, by the comments of a lock file (`# via NAME`)."""
    users: dict[str, set[str]] = {}
    name = ""
    for line in lock.splitlines():
        if match := re.match(r"\w[\w.-]*", line):
            name = match[0]
        elif name and (match := re.match(r"\s+#\s+(?:via\s+)?(?!-c |via$)(\S+)", line)):
            users.setdefault(name, set()).add(match[1])
    unneeded = {"keras", *TENSORFLOW}
    while more := {name for name, needing in users.items() if needing <= unneeded} - unneeded:
        unneeded |= more
    return unneeded - {*TENSORFLOW}


def download_wheels(locked: Sequence[str], kind: NodeKind, directory: Path) -> list[Path]:
    """Download the wheels of lines of a lock file into `directory`. Raises CsdctlError with pip's message."""
    requirements = directory / "requirements.txt"
    save_text(requirements, "\n".join(locked) + "\n")
    platforms = [word for tag in _TAGS for word in ("--platform", f"{tag}_{kind.architecture}")]
    abis = [word for abi in (f"cp{kind.python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"),
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp"),
        *("--python-version", kind.python, *abis, *platforms),
        *("--requirement", str(requirements), "--dest", str(directory)),
    ]
    doing = f"downloading the wheels for {kind.architecture} and Python {kind.python}"
    remedy = "check that this host reaches the package index; or collect elsewhere, and copy --bundles"
    run_program(command, doing, deadline_s=3600.0, remedy=remedy)
    return sorted(directory.glob("*.whl"))


def keep_libraries(source: Path, target: Path) -> None:
    """Write TensorFlow's wheel `source` to `target` with only its libraries and metadata."""

    def is_kept(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LIBRARIES)

    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in wheel.infolist():
            if not is_kept(entry.filename):
                continue
            content = wheel.read(entry)
            if entry.filename.endswith("/RECORD"):
                lines = content.splitlines(keepends=True)
                content = b"".join(line for line in lines if is_kept(line.decode().split(",")[0]))
            out.writestr(entry, content)


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
    kind: NodeKind
    recipe: str
    """The hash of the request, the locked wheels and the names of the Debian packages."""
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
        """The size of all files when they are unpacked."""
        return sum(file.unpacked_bytes for file in self.files)

    @property
    def needed_bytes(self) -> int:
        """The space that a node needs below the prefix, with byte code, and blocks that are not full."""
        return int(1.3 * self.unpacked_bytes)


@dataclass(frozen=True)
class ProvisionRequest:
    """The request of one `csdctl provision`. Raises InputError for a prefix that is no absolute path."""

    bundles: Path
    prefix: str = "/opt/csdctl"
    lock: Path = LOCK
    with_keras: bool = False
    """Whether nodes get Python's TensorFlow and Keras, too."""
    is_dry_run: bool = False
    sends_only: bool = False
    """Whether to stop after sending; then Ansible is not needed."""
    values: Mapping[str, str | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prefix.startswith("/") or ".." in self.prefix.split("/") or not self.prefix.strip("/"):
            remedy = "use an absolute path, such as /opt/csdctl"
            raise InputError(f"{option('prefix')} {self.prefix!r} cannot be used", remedy=remedy)


def collect_bundle(request: ProvisionRequest, kind: NodeKind, say: Say) -> Bundle:
    """Return the bundle of `kind`, downloaded if there is none yet. Raises InputError, CsdctlError."""
    locked = select_locked(load_text(request.lock), kind, with_keras=request.with_keras)
    recipe = hash_recipe(request, kind, locked)
    target = request.bundles / (kind.name + "-keras" * request.with_keras)
    if (target / "bundle.json").exists() and (bundle := load_bundle(target)).recipe == recipe:
        return bundle
    say(f"{kind.name}: collecting wheels{' and Python' if kind.sends_python else ''}")
    with replacing_directory(target) as staging:
        bundle = replace(_build(request, kind, locked, staging), recipe=recipe)
        content = {name: value for name, value in asdict(bundle).items() if name != "directory"}
        save_json(staging / "bundle.json", {"schema": SCHEMA, **content})
    sizes = f"{format_bytes(bundle.num_bytes)} to send, {format_bytes(bundle.unpacked_bytes)} unpacked"
    say(f"{kind.name}: {sizes}")
    return load_bundle(target)


def load_bundle(directory: Path) -> Bundle:
    """Read bundle.json. Raises InputError when it is missing or not valid."""
    path = directory / "bundle.json"
    content = load_json(path)
    if not isinstance(content, dict) or content.pop("schema", "") != SCHEMA:
        remedy = f"remove {path.parent} and run `csdctl provision --collect` again"
        raise InputError(f"{path} is not as it was collected", remedy=remedy)
    return check_values({"directory": str(directory), **content}, Bundle, str(path))


def _build(request: ProvisionRequest, kind: NodeKind, locked: Sequence[str], staging: Path) -> Bundle:
    wheels = staging / "wheels"
    wheels.mkdir()
    with tempfile.TemporaryDirectory(dir=staging.parent, prefix=".collecting-") as temporary:
        files = []
        for path in download_wheels(locked, kind, Path(temporary)):
            is_tensorflow = path.name.split("-")[0].replace("_", "-") in TENSORFLOW
            prepare = keep_libraries if is_tensorflow and not request.with_keras else shutil.move
            prepare(path, wheels / path.name)
            with zipfile.ZipFile(wheels / path.name) as wheel:
                unpacked_bytes = sum(entry.file_size for entry in wheel.infolist())
            files.append(_describe(wheels / path.name, unpacked_bytes))
        pins = [f"{'=='.join(file.name.split('-')[:2])} --hash=sha256:{file.sha256}\n" for file in files]
        save_text(wheels / "requirements.txt", "".join(pins))
        (wheels / "requirements.txt").chmod(0o600)
        bundle = Bundle(staging, kind, "", tuple(files))
        if not kind.sends_python:
            return bundle
        archive = staging / "python.tar.gz"
        work = Path(temporary) / "python"
        python_id, unpacked_bytes = build_python(kind.architecture, request.prefix, work, archive)
    return replace(bundle, python=_describe(archive, unpacked_bytes), python_id=python_id)


def _describe(path: Path, unpacked_bytes: int) -> BundleFile:
    return BundleFile(path.name, hash_file(path), path.stat().st_size, unpacked_bytes)


def hash_recipe(request: ProvisionRequest, kind: NodeKind, locked: Sequence[str]) -> str:
    """Return the hash of the input of a bundle. Debian's versions are found when it is collected."""
    archive = [ARCHIVE_VERSION, request.prefix, MIRRORS, DEBIAN_PACKAGES] if kind.sends_python else []
    made_from = [SCHEMA, asdict(kind), sorted(locked), _LIBRARIES, archive, request.with_keras]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def python_directory(prefix: str, archive_id: str) -> str:
    """Return where the archive is unpacked on a node."""
    return f"{prefix}/python-{archive_id}"


def build_python(architecture: str, prefix: str, work: Path, archive: Path) -> tuple[str, int]:
    """Collect Python for nodes of `architecture` that install below `prefix`, as `archive`.

    apt downloads and verifies Debian's packages in `work`, without root. The archive has its own C library
    and loader, whose path is written into the program: it runs whatever the glibc of the node is.

    Return its id and unpacked bytes. Raises CsdctlError when a program is missing on this host, or apt fails.
    """
    needed = {"apt-get": "apt", "dpkg-deb": "dpkg", "patchelf": "patchelf"}
    missing = {program: package for program, package in needed.items() if not find_program(program)}
    if not KEYRING.exists():
        missing[str(KEYRING)] = "debian-archive-keyring"
    if missing:
        install = f"apt-get install {' '.join(missing.values())}"
        raise CsdctlError(
            f"collecting Python for nodes that have none needs {', '.join(missing)}, not installed here",
            remedy=f"`{install}`, or install Python {SENT_PYTHON} on those nodes",
        )
    packages = _download(ARCHITECTURES[architecture], work)
    made_from = f"{ARCHIVE_VERSION} {prefix} {sorted(packages.items())}"
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:12]
    tree = work / "tree"
    for name in packages:
        command = ["dpkg-deb", "--extract", str(work / "debs" / name), str(tree)]
        run_program(command, "unpacking Python", remedy="check the free space of this host")
    _bind_to(tree, architecture, python_directory(prefix, digest))
    return digest, _pack(tree, archive)


def _download(architecture: str, work: Path) -> dict[str, str]:
    """Download the packages with an apt that uses nothing of this host. Return their hashes by name."""
    root, debs = work / "apt", work / "debs"
    for place in (root / "var/lib/apt/lists/partial", root / "var/cache/apt/archives/partial", debs):
        place.mkdir(parents=True)
    (root / "status").touch()
    sources = [f"deb [signed-by={KEYRING}] {address} {suite} main\n" for suite, address in MIRRORS.items()]
    save_text(root / "etc/apt/sources.list", "".join(sources))
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures::": architecture,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir": root,
        "Dir::State::status": root / "status",
    }
    apt = ["apt-get", "--quiet", *(f"--option={name}={value}" for name, value in options.items())]
    remedy = "check the network of this host"
    run_program([*apt, "update"], "apt-get update", remedy=remedy)
    run_program([*apt, "download", *DEBIAN_PACKAGES], "apt-get download", remedy=remedy, cwd=debs)
    return {path.name: hash_file(path) for path in sorted(debs.glob("*.deb"))}


def _bind_to(tree: Path, architecture: str, directory: str) -> None:
    """Write loader and library paths into the program.

    Unlike DT_RUNPATH, DT_RPATH also applies to libraries that extension modules load.
    """
    libraries = f"usr/lib/{architecture}-linux-gnu"
    # Keep everything below sys.base_prefix, the only place a sandboxed Python may access.
    for source in (tree / "lib" / f"{architecture}-linux-gnu").iterdir():
        source.replace(tree / libraries / source.name)
    for name in ("lib", "lib64"):
        shutil.rmtree(tree / name, ignore_errors=True)
    program = tree / f"usr/bin/python{SENT_PYTHON}"
    loader, paths = f"{directory}/{libraries}/{_LOADERS[architecture]}", f"{directory}/{libraries}"
    options = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", paths)
    run_program(
        [find_program("patchelf"), *options, str(program)], "patchelf", remedy="update patchelf on this host"
    )


def _pack(tree: Path, archive: Path) -> int:
    """Pack `tree`. The same content gives the same bytes. Return the size of its files."""

    def normalize(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mode &= 0o755
        return entry

    with (
        gzip.GzipFile(archive, "wb", 6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        tar.add(tree, ".", filter=normalize)  # in alphabetical order
    return sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
