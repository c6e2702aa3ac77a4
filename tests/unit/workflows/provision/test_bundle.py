"""A bundle on disk, and sending it."""

import contextlib
import hashlib
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.documents import save_json
from csdctl.errors import CsdctlError, InputError
from csdctl.shipping.store import hash_file
from csdctl.transport.local import LocalSession
from csdctl.workflows.provision import bundle as bundles
from csdctl.workflows.provision.bundle import (
    SCHEMA,
    Bundle,
    BundleFile,
    ProvisionRequest,
    build_python,
    load_bundle,
    python_directory,
)
from csdctl.workflows.provision.machine import BareMachine, NodeKind
from csdctl.workflows.provision.provision import Sent, read_bundle, send_bundle
from tests.fake_session import FakeSession

KIND = NodeKind("aarch64", "3.11", sends_python=True)
ARCHIVE = b"an archive of Python"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/small-1.0-py3-none-any.whl").write_bytes(b"a wheel")
    (tmp_path / "python.tar.gz").write_bytes(ARCHIVE)
    content = {
        "schema": SCHEMA,
        "kind": {"architecture": "aarch64", "python": "3.11", "sends_python": True},
        "recipe": "r",
        "wheels": [entry("small-1.0-py3-none-any.whl", b"a wheel")],
        "python": entry("python.tar.gz", ARCHIVE),
        "python_id": "0123456789ab",
    }
    save_json(tmp_path / "bundle.json", content)
    return load_bundle(tmp_path)


def entry(name: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    return {"name": name, "sha256": digest, "num_bytes": len(content), "unpacked_bytes": 1000}


def machine(installed: str = "", free_bytes: int = 1 << 30) -> BareMachine:
    return BareMachine("csd0", KIND, "", "/root", is_root=True, free_bytes=free_bytes, installed=installed)


def send(bundle: Bundle, session: FakeSession, to: BareMachine, *, dry_run: bool = False) -> Sent:
    request = ProvisionRequest(Path(), is_dry_run=dry_run)
    return send_bundle(request, session, to, read_bundle(bundle))


def test_nothing_is_sent_when_it_is_installed_or_the_run_is_dry(bundle: Bundle) -> None:
    session = FakeSession("csd0").on("sh", exit_code=1)
    assert send(bundle, session, machine(bundle.id)).is_installed
    assert send(bundle, session, machine(), dry_run=True).num_bytes == bundle.num_bytes
    assert session.stdins == [b""]


def test_full_disk_stops_before_sending_and_a_failed_unpacking_has_the_words_of_the_node(
    bundle: Bundle,
) -> None:
    session = FakeSession("csd0").on("sh", exit_code=1, stderr="tar: no space left on device")
    with pytest.raises(CsdctlError, match="0 MiB are free at /opt/csdctl"):
        send(bundle, session, machine(free_bytes=100))
    assert ARCHIVE not in session.stdins
    with pytest.raises(CsdctlError, match="unpacking Python failed .* no space left on device"):
        send(bundle, session, machine())
    assert ARCHIVE in session.stdins


def test_python_that_was_damaged_on_the_node_is_sent_again(bundle: Bundle, tmp_path: Path) -> None:
    usr = tmp_path / "archive/usr/bin"
    usr.mkdir(parents=True)
    (usr / "python3.11").symlink_to(Path(sys.executable).resolve())
    archive = bundle.directory / "python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "archive", ".")
    python = BundleFile("python.tar.gz", hash_file(archive), archive.stat().st_size, unpacked_bytes=1000)
    bundle = replace(bundle, python=python)
    prefix, home = tmp_path / "prefix", tmp_path / "home"
    home.mkdir()
    damaged = Path(python_directory(str(prefix), bundle.python_id))
    (damaged / "usr").mkdir(parents=True)
    with contextlib.closing(LocalSession("csd0", home, {"HOME": str(home)})) as session:
        request = ProvisionRequest(Path(), str(prefix))
        sent = send_bundle(request, session, machine(), read_bundle(bundle))
    assert Path(sent.python).is_symlink()
    assert [path.name for path in damaged.iterdir()] == ["usr"]


def test_all_packages_that_collecting_python_lacks_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "find_program", lambda name: "" if name == "patchelf" else name)
    monkeypatch.setattr(bundles, "KEYRING", tmp_path / "keyring.gpg")
    with pytest.raises(CsdctlError, match=r"needs patchelf, .*keyring\.gpg") as raised:
        build_python("aarch64", "/opt/csdctl", tmp_path, tmp_path / "python.tar.gz")
    assert "`apt-get install patchelf debian-archive-keyring`" in raised.value.remedy


def test_recipe_changes_with_the_debian_packages_and_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    request = ProvisionRequest(Path("bundles"))
    recipes = {bundles.hash_recipe(request, KIND, ())}
    for name, value in (("DEBIAN_PACKAGES", ("libc6",)), ("MIRRORS", {"trixie": "http://mirror"})):
        monkeypatch.setattr(bundles, name, value)
        recipes.add(bundles.hash_recipe(request, KIND, ()))
    assert len(recipes) == 3


def test_other_file_in_place_of_a_bundle_is_an_error(tmp_path: Path) -> None:
    save_json(tmp_path / "bundle.json", {"schema": "another"})
    with pytest.raises(InputError, match=r"bundle\.json is not as it was collected"):
        load_bundle(tmp_path)
