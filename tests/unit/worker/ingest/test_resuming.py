"""An interrupted `prepare` resumes where it stopped, and always writes the same bytes."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, ImageRule, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from tests.unit.worker.ingest.prepared_data import InterruptionError, arrays_of, stop_at
from tests.unit.worker.ingest.sources.encoded_images import colours, png

NUM_IMAGES = 600
INGEST = "csdctl.worker.ingest"


@pytest.fixture(scope="module")
def image_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree of 600 images in two classes, every seventh of them damaged."""
    root = tmp_path_factory.mktemp("images")
    for number in range(NUM_IMAGES):
        content = png(colours(8 + number % 5, 9, seed=number))
        path = root / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content[: len(content) - 40 * (number % 7 == 0)])
    return root


def request_for(images: Path, directory: Path) -> PrepareSpec:
    return PrepareSpec(str(images), str(directory / "store"), ImageRule((5, 5, 3)), names_classes=True)


@pytest.fixture
def spec(image_tree: Path, tmp_path: Path) -> PrepareSpec:
    return request_for(image_tree, tmp_path)


@pytest.fixture(scope="module")
def whole(image_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    """Return the result of `spec`, prepared without interruption by one thread."""
    with patch(f"{INGEST}.sources.source.num_threads", return_value=1):
        return prepare(request_for(image_tree, tmp_path_factory.mktemp("whole")))


def content(info: DatasetInfo) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(info.path).iterdir() if path.suffix == ".npy"}


def partial_directories(spec: PrepareSpec) -> list[Path]:
    return list(Path(spec.store).glob(".part-*"))


def interrupt(spec: PrepareSpec, after: int) -> None:
    with patch(f"{INGEST}.partial_dataset.SYNC_INTERVAL_S", 0), pytest.raises(InterruptionError):
        prepare(spec, on_progress=stop_at(after))


def resume(spec: PrepareSpec) -> tuple[int, DatasetInfo]:
    """Return how much was there, and the result."""
    seen: list[int] = []
    info = prepare(spec, on_progress=lambda progress: seen.append(progress.num_done))
    return seen[0], info


@pytest.mark.parametrize(("threads", "block_samples"), [(5, 256), (2, 7)])
def test_bytes_depend_neither_on_threads_nor_on_blocks(
    spec: PrepareSpec, whole: DatasetInfo, threads: int, block_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{INGEST}.sources.source.BLOCK_SAMPLES", block_samples)
    monkeypatch.setattr(f"{INGEST}.sources.source.num_threads", lambda: threads)
    found = prepare(spec)
    assert content(found) == content(whole)
    assert replace(found, path="") == replace(whole, path="")
    assert whole.num_skipped == {"undecodable": len(range(0, NUM_IMAGES, 7))}


def test_fingerprint_depends_on_image_rule_and_classes(spec: PrepareSpec) -> None:
    rules = [ImageRule((5, 5, 3)), ImageRule((5, 5, 1)), ImageRule((5, 5, 3), "pad")]
    rules.append(ImageRule((5, 5, 3), max_pixels=80))
    prepared = [prepare(replace(spec, picture=rule)) for rule in rules]
    prepared.append(prepare(replace(spec, classes=("dog", "cat"))))
    assert len({info.fingerprint for info in prepared}) == 5
    assert prepare(spec) == prepared[0]


@pytest.mark.parametrize("after", [1, 512])
def test_finished_work_is_not_repeated(spec: PrepareSpec, whole: DatasetInfo, after: int) -> None:
    interrupt(spec, after)
    num_before, info = resume(spec)
    assert num_before >= after
    assert content(info) == content(whole)
    assert replace(info, path="") == replace(whole, path="")
    assert partial_directories(spec) == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("record.json", lambda path: path.write_text("{")),
        ("images.npy", lambda path: os.truncate(path, 300)),
        ("labels.npy", lambda path: path.write_bytes(path.read_bytes() + b"half a sample")),
        ("labels.npy", Path.unlink),
    ],
)
def test_damaged_work_gives_the_same_bytes(
    spec: PrepareSpec, whole: DatasetInfo, name: str, change: Callable[[Path], object]
) -> None:
    interrupt(spec, after=256)
    change(partial_directories(spec)[0] / name)
    assert content(prepare(spec)) == content(whole)


def test_part_of_a_changed_source_is_dropped(spec: PrepareSpec, image_tree: Path, tmp_path: Path) -> None:
    changing = replace(spec, source=shutil.copytree(image_tree, str(tmp_path / "copy")))
    interrupt(changing, after=1)
    (tmp_path / "copy" / "cat" / "0.png").unlink()
    info = prepare(changing)
    assert info.num_samples + sum(info.num_skipped.values()) == NUM_IMAGES - 1
    assert partial_directories(changing) == []


def test_arrays_are_resumed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{INGEST}.sources.arrays.BLOCK_BYTES", 100)
    images = colours(50, 6, 4).reshape(50, 6, 4)
    np.savez_compressed(tmp_path / "a.npz", x=images, y=np.arange(50))
    spec = PrepareSpec(str(tmp_path / "a.npz"), str(tmp_path / "store"))
    interrupt(spec, after=17)
    samples, labels = arrays_of(prepare(spec))
    assert np.array_equal(samples, images)
    assert labels.tolist() == list(range(50))


def test_second_process_waits_for_the_lock_and_then_fails(spec: PrepareSpec) -> None:
    interrupt(spec, after=1)
    lock = os.open(partial_directories(spec)[0], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with (
            patch(f"{INGEST}.partial_dataset.LOCK_DEADLINE_S", 0.2),
            pytest.raises(WorkerError, match="another csdctl is preparing the same data"),
        ):
            prepare(spec)
    finally:
        os.close(lock)
    assert prepare(spec).num_samples > 0


def test_disk_that_is_too_small_is_reported_before_the_work(spec: PrepareSpec) -> None:
    petabytes = replace(spec, picture=ImageRule((1_000_000, 1_000_000, 3)))
    with pytest.raises(WorkerError, match=r"1800000\.0 GB are needed, \d+\.\d GB are free") as raised:
        prepare(petabytes)
    assert (raised.value.exit_code, raised.value.remedy) == (1, "free disk space")
    assert partial_directories(spec) == []


def test_worker_exits_if_csdctl_is_gone(spec: PrepareSpec, tmp_path: Path) -> None:
    function = tmp_path / "slow.py"
    function.write_text("import time\n\n\ndef load(path):\n    time.sleep(100_000)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "csdctl.worker", "prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(to_json(replace(spec, function=f"{function}:load")).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"@csdctl-progress ")
    process.stdout.close()
    try:
        assert process.wait() == 1
    finally:
        process.kill()
