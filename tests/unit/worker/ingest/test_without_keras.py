"""Preparing data where TensorFlow's libraries are, without Python's TensorFlow and Keras.

The packages are those that `csdctl provision` installs, as links to those of this environment.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.worker.ingest.sources.encoded_images import colours, jpeg, png
from tests.unit.worker.ingest.sources.test_tfrecord import ENCODED, write

LINKED = ("numpy", "numpy.libs", "PIL", "pillow.libs")
LIBRARIES = [f"tensorflow/libtensorflow_{name}.so.2" for name in ("cc", "framework")]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    found = find_spec("numpy")
    assert found
    assert found.origin
    source, target = Path(found.origin).parent.parent, tmp_path / "packages"
    (target / "tensorflow").mkdir(parents=True)
    for name in (*LINKED, *LIBRARIES):
        if (source / name).exists():
            (target / name).symlink_to(source / name)
    return target


def run(packages: Path, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a program with these packages and csdctl alone."""
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{Path.cwd()}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


PREPARED = """
import sys
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.protocol.datasets import ImageRule, PrepareSpec, RecordSchema
source, store, kind = sys.argv[1:]
records = RecordSchema("image", "label") if kind == "records" else None
rule = ImageRule((6, 6, 3))
info = prepare(PrepareSpec(source, store, rule, records=records, names_classes=kind == "folders"))
unneeded = {"tensorflow", "keras", "h5py", "google"}
print(info.num_samples, info.num_skipped, sorted(unneeded & set(sys.modules)))
"""


@pytest.mark.parametrize("kind", ["folders", "records"])
def test_pictures_and_records_are_read(tmp_path: Path, packages: Path, kind: str) -> None:
    source = tmp_path / "data"
    (source / "one").mkdir(parents=True)
    if kind == "records":
        write(source / "a.tfrecord", ENCODED)
    else:
        for number in range(5):
            encode = jpeg if number % 2 else png
            (source / "one" / str(number)).write_bytes(encode(colours(40, 30)))
    done = run(packages, PREPARED, str(source), str(tmp_path / "store"), kind)
    assert done.stdout.strip() == "5 {} []", done.stderr


CALLED = """
import sys
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec
try:
    print(prepare(PrepareSpec(sys.argv[1], sys.argv[2], function=f"{sys.argv[1]}:load")).num_samples)
except WorkerError as error:
    print(f"{error}; remedy: {error.remedy}")
"""


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("# as fit() of Keras takes them: keras, tensorflow", "4"),
        ("import tensorflow as tf", "this machine has TensorFlow's libraries, but not Python's TensorFlow"),
        ("    from keras import ops", "a step that cannot be compiled needs them, and so does your code"),
        ("    from keras import ops", "remedy: install them: `csdctl provision --with-keras`"),
    ],
)
def test_function_without_keras_runs(tmp_path: Path, packages: Path, line: str, printed: str) -> None:
    top, inner = ("", line) if line.startswith(" ") else (line, "")
    code = f"import numpy as np\n{top}\ndef load(path):\n{inner}\n    return np.ones((4, 2)), np.arange(4)\n"
    (tmp_path / "data.py").write_text(code)
    done = run(packages, CALLED, str(tmp_path / "data.py"), str(tmp_path / "store"))
    assert printed in done.stdout, done.stderr
