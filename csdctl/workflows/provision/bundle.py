"""A bundle: everything a kind of node needs, on the host, with the hash of every file.

.csdctl/provision/KIND/bundle.json       what it was made from, and every file's hash and size
.csdctl/provision/KIND/wheels/           trimmed wheels, and requirements.txt with their hashes
.csdctl/provision/KIND/python.tar.gz     Python itself, for nodes that have none
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from csdctl.documents import build_atomically, check_values, load_json, load_text, save_json, save_text
from csdctl.errors import InputError
from csdctl.notify import Say
from csdctl.reporting.numbers import format_bytes
from csdctl.shipping.chunks import SharedChunks, printable
from csdctl.shipping.payload import Payload, TreeRequest, pack_payload, read_tree
from csdctl.shipping.store import hash_file
from csdctl.workflows.provision import debian_python, trimming
from csdctl.workflows.provision.debian_python import build_python
from csdctl.workflows.provision.machine import Kind
from csdctl.workflows.provision.trimming import trim_wheel
from csdctl.workflows.provision.wheels import download_wheels, select_locked

SCHEMA = "csdctl.bundle/1"
WHEELS = "csdctl-wheels"
"""Where the wheels lie on a node, relative to the home of its user."""

_SPARE = 1.3
"""For the byte code of the packages, and blocks that are not full."""


@dataclass(frozen=True)
class BundleFile:
    """A file of a bundle; for a wheel, `origin_*` describe it as it was downloaded."""

    name: str
    sha256: str
    num_bytes: int
    origin_sha256: str = ""
    origin_bytes: int = 0
    unpacked_before: int = 0
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
    packages: tuple[tuple[str, str], ...] = ()
    """Debian's packages in the archive of Python: file name and SHA-256."""

    @property
    def id(self) -> str:
        """A short name of its content."""
        files = [file.sha256 for file in (*self.wheels, *([self.python] if self.python else []))]
        return hashlib.sha256(" ".join([self.recipe, *files]).encode()).hexdigest()[:12]

    @property
    def num_bytes(self) -> int:
        """The bytes that are sent to a node that has nothing yet."""
        return sum(file.num_bytes for file in (*self.wheels, *([self.python] if self.python else [])))

    @property
    def wheel_bytes(self) -> int:
        """The size of the wheels, which a node keeps in its user's home."""
        return sum(file.num_bytes for file in self.wheels)

    @property
    def unpacked_bytes(self) -> int:
        """The space that a node needs below the prefix."""
        python_bytes = self.python.unpacked_bytes if self.python else 0
        return int(_SPARE * (sum(file.unpacked_bytes for file in self.wheels) + python_bytes))

    @property
    def needed_bytes(self) -> int:
        """The free space that a node needs, the wheels included."""
        return self.unpacked_bytes + self.num_bytes

    def pack(self, chunks: SharedChunks) -> Payload:
        """Return the wheels as a payload; raises InputError for a file that is not as it was collected."""
        tree = read_tree(TreeRequest(self.directory / "wheels", WHEELS), chunks)
        found = {name: stored.source.sha256 for name, stored in tree.files}
        for file in self.wheels:
            if found.get(file.name) != file.sha256:
                raise _damaged(self.directory / "wheels" / file.name)
        return pack_payload(trees=[tree])

    def python_archive(self) -> Path:
        """Return the archive of Python; raises InputError when it is not as it was collected."""
        path = self.directory / "python.tar.gz"
        if not self.python or not path.is_file() or hash_file(path) != self.python.sha256:
            raise _damaged(path)
        return path


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
        save_json(new / "bundle.json", {"schema": SCHEMA, **_as_json(bundle)})
    before = sum(file.unpacked_before for file in bundle.wheels)
    after = sum(file.unpacked_bytes for file in bundle.wheels)
    say(
        f"{kind.name}: {format_bytes(bundle.num_bytes)} to send, "
        f"{format_bytes(after)} unpacked (untrimmed {format_bytes(before)})"
    )
    return load_bundle(target)


def load_bundle(directory: Path) -> Bundle:
    """Read bundle.json; raises InputError when it is missing or not valid."""
    path = directory / "bundle.json"
    content = load_json(path)
    if not isinstance(content, dict) or content.pop("schema", "") != SCHEMA:
        raise _damaged(path)
    return check_values({"directory": str(directory), **content}, Bundle, str(path))


def _build(kind: Kind, recipe: str, lock: Path, prefix: str, new: Path) -> Bundle:
    wheels = new / "wheels"
    wheels.mkdir()
    with tempfile.TemporaryDirectory(dir=new.parent, prefix=".collecting-") as temporary:
        origin = Path(temporary)
        files = [_trim(path, wheels / path.name) for path in download_wheels(lock, kind, origin)]
        save_text(wheels / "requirements.txt", _pin(files))
        (wheels / "requirements.txt").chmod(0o600)
        python = None
        archive = None
        if kind.sends_python:
            work = origin / "python"
            work.mkdir()
            archive = build_python(kind.architecture, prefix, work)
            archive.path.rename(new / "python.tar.gz")
            sent = new / "python.tar.gz"
            python = BundleFile(
                sent.name, hash_file(sent), sent.stat().st_size, unpacked_bytes=archive.unpacked_bytes
            )
    return Bundle(
        new,
        kind,
        recipe,
        tuple(files),
        python,
        archive.id if archive else "",
        tuple(sorted(archive.packages.items())) if archive else (),
    )


def _trim(source: Path, target: Path) -> BundleFile:
    trimmed = trim_wheel(source, target)
    return BundleFile(
        target.name,
        hash_file(target),
        target.stat().st_size,
        hash_file(source),
        source.stat().st_size,
        trimmed.before_bytes,
        trimmed.after_bytes,
    )


def _pin(files: Sequence[BundleFile]) -> str:
    """Return a requirements file with the hashes of the trimmed wheels."""
    lines = []
    for file in files:
        name, version = file.name.split("-")[:2]
        lines.append(f"{name}=={version} --hash=sha256:{file.sha256}\n")
    return "".join(lines)


def _recipe(kind: Kind, locked: Sequence[str], prefix: str) -> str:
    versions = [trimming.RULES_VERSION, *([debian_python.RULES_VERSION, prefix] if kind.sends_python else [])]
    made_from = [SCHEMA, asdict(kind), sorted(locked), versions]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def _as_json(bundle: Bundle) -> dict[str, object]:
    content = asdict(bundle)
    del content["directory"]
    return content


def _damaged(path: Path) -> InputError:
    return InputError(
        f"{printable(str(path))} is not as it was collected",
        remedy=f"remove {printable(str(path.parent))} and run `csdctl provision --collect` again",
    )
