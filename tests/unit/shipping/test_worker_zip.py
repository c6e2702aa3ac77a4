import io
import re
import subprocess
import sys
import zipfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from csdctl.shipping.store import pack_worker

ROOT = Path(__file__).parents[3] / "csdctl"


def test_zip_is_the_worker_and_the_version_in_the_same_bytes_in_another_process() -> None:
    code = "import sys; from csdctl.shipping.store import pack_worker as p; sys.stdout.buffer.write(p())"
    packed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert pack_worker() == packed
    sources = {str(path.relative_to(ROOT.parent)) for path in (ROOT / "worker").rglob("*.py")}
    expected = {"__main__.py", "csdctl/__init__.py"} | sources | {f"{source}c" for source in sources}
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == sorted(expected)
        path = "csdctl/worker/engine/step.py"
        assert archive.read(path) == (ROOT.parent / path).read_bytes()


def test_zip_runs_without_an_installed_csdctl(tmp_path: Path) -> None:
    (tmp_path / "worker.pyz").write_bytes(pack_worker())

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        # -S: without site-packages, where an installed csdctl might be
        command = [sys.executable, "-I", "-S", "worker.pyz", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={})

    helped = run("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert re.search(r"prepare.*build.*rank", helped.stdout)
    assert run("unheard").returncode == 2


PRINT_FILE = (
    "import sys; sys.path.insert(0, 'worker.pyz'); "
    "from csdctl.worker.protocol import recipe; print(recipe.__file__)"
)


@pytest.mark.parametrize(("magic", "suffix"), [(MAGIC_NUMBER, ".pyc"), (b"\0\0\r\n", ".py")])
def test_only_another_version_of_python_compiles_the_sources(
    tmp_path: Path, magic: bytes, suffix: str
) -> None:
    with (
        zipfile.ZipFile(io.BytesIO(pack_worker())) as packed,
        zipfile.ZipFile(tmp_path / "worker.pyz", "w") as changed,
    ):
        for name in packed.namelist():
            content = packed.read(name)
            changed.writestr(name, magic + content[len(magic) :] if name.endswith(".pyc") else content)
    command = [sys.executable, "-I", "-S", "-c", PRINT_FILE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(f"recipe{suffix}")
