"""The host's content-addressed store, and the worker's zip in it."""

import hashlib
import io
import re
import subprocess
import sys
import zipfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.shipping.store import OBJECTS, hash_file, pack_worker, read_chunk, store_bytes, store_file


def test_stored_file_is_named_by_its_hash(host: Path, tmp_path: Path) -> None:
    stored = store_bytes(b"abc", ".json", host)
    assert stored.sha256 == hashlib.sha256(b"abc").hexdigest() == hash_file(stored.source)
    assert stored.path == f"{OBJECTS}/{stored.sha256}.json"
    assert stored.source == host / stored.path
    assert stored.source.read_bytes() == b"abc"
    assert stored.size == 3
    (tmp_path / "weights.json").write_bytes(b"abc")
    assert store_file(tmp_path / "weights.json", host) == stored
    stored.source.unlink()
    with pytest.raises(InputError, match=stored.sha256):
        read_chunk(stored, 0)


def test_only_a_damaged_file_in_the_hosts_store_is_written_again(host: Path, tmp_path: Path) -> None:
    (tmp_path / "source.npy").write_bytes(b"right")
    path = store_file(tmp_path / "source.npy", host).source
    before = path.stat()
    assert store_bytes(b"right", ".npy", host).source == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_bytes(b"wrong")
    store_file(tmp_path / "source.npy", host)
    assert path.read_bytes() == b"right"
    assert len(list((host / OBJECTS).iterdir())) == 1


@pytest.mark.fault(25)
def test_failed_copy_leaves_nothing_in_the_store(host: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100_000))
    script = f"""
import resource, pathlib, signal
from csdctl.shipping.store import store_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store_file(pathlib.Path({str(tmp_path / "a.bin")!r}), pathlib.Path({str(host)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert list((host / OBJECTS).iterdir()) == []


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
