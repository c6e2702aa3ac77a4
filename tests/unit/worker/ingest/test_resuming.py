"""An interrupted `prepare` resumes where it stopped, and always writes the same bytes."""

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.forward import BATCH_SIZE
from csdctl.worker.ingest.extract import extract
from csdctl.worker.ingest.partial_dataset import PartialDataset
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.ingest.sources.source import Block, IngestLimits
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, ImageRule, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.run_spec import DatasetSlice, Runtime
from tests.unit.worker.compute.test_lite import prefix_in
from tests.unit.worker.ingest.sources.encoded_images import colours, png

NUM_IMAGES = 600
SYNC_ALWAYS = IngestLimits(sync_interval_s=0)


@pytest.fixture(scope="module")
def image_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree of 600 images in two classes, every seventh of them damaged."""
    root = tmp_path_factory.mktemp("images")
    for name in ("cat", "dog"):
        (root / name).mkdir()
    for number in range(NUM_IMAGES):
        content = png(colours(8 + number % 5, 9, seed=number))
        kept = len(content) - 40 * (number % 7 == 0)
        (root / ("cat", "dog")[number % 2] / f"{number}.png").write_bytes(content[:kept])
    return root


@pytest.fixture
def spec(image_tree: Path, tmp_path: Path) -> PrepareSpec:
    return PrepareSpec(str(image_tree), str(tmp_path / "store"), ImageRule((5, 5, 3)), names_classes=True)


@pytest.fixture(scope="module")
def whole(image_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    """Return the result of `spec`, prepared without interruption by one thread."""
    store = str(tmp_path_factory.mktemp("whole"))
    return prepare(PrepareSpec(str(image_tree), store, ImageRule((5, 5, 3)), names_classes=True), threads=1)


def content(info: DatasetInfo) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(info.path).iterdir() if path.suffix == ".npy"}


def partial_directories(spec: PrepareSpec) -> list[Path]:
    return list(Path(spec.store).glob(".part-*"))


class InterruptionError(Exception):
    """Stands for a power failure."""


def interrupt(spec: PrepareSpec, after: int, limits: IngestLimits = SYNC_ALWAYS) -> None:
    def stop(progress: PrepareProgress) -> None:
        if progress.num_done >= after:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        prepare(spec, limits=limits, on_progress=stop)


class TestSameBytes:
    @pytest.mark.parametrize("threads", [2, 5])
    def test_bytes_do_not_depend_on_the_number_of_threads(
        self, spec: PrepareSpec, whole: DatasetInfo, threads: int
    ) -> None:
        many = prepare(spec, threads=threads)
        assert content(many) == content(whole)
        assert replace(many, path="") == replace(whole, path="")
        assert whole.num_skipped == {"undecodable": len(range(0, NUM_IMAGES, 7))}

    def test_bytes_do_not_depend_on_the_block_size(self, spec: PrepareSpec, whole: DatasetInfo) -> None:
        assert content(prepare(spec, limits=IngestLimits(block_samples=7))) == content(whole)

    def test_fingerprint_depends_on_image_rule_and_classes(self, spec: PrepareSpec) -> None:
        rules = [ImageRule((5, 5, 3)), ImageRule((5, 5, 1)), ImageRule((5, 5, 3), "pad")]
        rules.append(ImageRule((5, 5, 3), max_pixels=80))
        prepared = [prepare(replace(spec, picture=rule)) for rule in rules]
        prepared.append(prepare(replace(spec, classes=("dog", "cat"))))
        assert len({info.fingerprint for info in prepared}) == 5
        assert prepare(spec) == prepared[0]


class TestResume:
    @pytest.mark.parametrize("after", [1, 256, 512])
    def test_finished_work_is_not_repeated_and_the_bytes_are_the_same(
        self, spec: PrepareSpec, whole: DatasetInfo, after: int
    ) -> None:
        interrupt(spec, after)
        seen: list[int] = []
        info = prepare(spec, on_progress=lambda progress: seen.append(progress.num_done))
        assert seen[0] >= after
        assert content(info) == content(whole)
        assert replace(info, path="") == replace(whole, path="")
        assert partial_directories(spec) == []

    def test_data_written_after_the_last_record_is_truncated(
        self, spec: PrepareSpec, whole: DatasetInfo
    ) -> None:
        interrupt(spec, after=1)
        for name in ("images.npy", "labels.npy"):
            with (partial_directories(spec)[0] / name).open("ab") as file:
                file.write(b"half a sample")
        assert content(prepare(spec)) == content(whole)

    @pytest.mark.parametrize("record", ["", "{", "[]", '{"fingerprint": "another"}'])
    def test_unusable_record_starts_from_scratch(
        self, spec: PrepareSpec, whole: DatasetInfo, record: str
    ) -> None:
        interrupt(spec, after=1)
        (partial_directories(spec)[0] / "record.json").write_text(record)
        assert content(prepare(spec)) == content(whole)

    @pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
    @pytest.mark.parametrize("num_bytes", [0, 50, 300])
    def test_files_that_were_cut_start_from_scratch(
        self, spec: PrepareSpec, whole: DatasetInfo, name: str, num_bytes: int
    ) -> None:
        interrupt(spec, after=256)
        os.truncate(partial_directories(spec)[0] / name, num_bytes)
        assert content(prepare(spec)) == content(whole)

    def test_missing_file_starts_from_scratch(self, spec: PrepareSpec, whole: DatasetInfo) -> None:
        interrupt(spec, after=1)
        (partial_directories(spec)[0] / "labels.npy").unlink()
        assert content(prepare(spec)) == content(whole)

    def test_partial_data_is_dropped_if_the_source_has_changed(
        self, spec: PrepareSpec, image_tree: Path, tmp_path: Path
    ) -> None:
        root = tmp_path / "copy"
        shutil.copytree(image_tree, root)
        changing = replace(spec, source=str(root))
        interrupt(changing, after=1)
        (root / "cat" / "0.png").unlink()
        info = prepare(changing)
        assert info.num_samples + sum(info.num_skipped.values()) == NUM_IMAGES - 1
        assert partial_directories(changing) == []

    def test_work_of_a_killed_worker_is_resumed(self, spec: PrepareSpec, whole: DatasetInfo) -> None:
        program = (
            "import os, signal, sys\n"
            "from csdctl.worker.protocol.datasets import PrepareSpec\n"
            "from csdctl.worker.protocol.json_codec import from_json\n"
            "from csdctl.worker.ingest.sources.source import IngestLimits\n"
            "from csdctl.worker.ingest.prepare import prepare\n"
            "limits = IngestLimits(sync_interval_s=0)\n"
            "def stop(progress):\n"
            "    if progress.num_done >= 256:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "prepare(from_json(PrepareSpec, sys.argv[1]), limits=limits, on_progress=stop)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, to_json(spec)], check=False, capture_output=True
        )
        assert done.returncode == -signal.SIGKILL
        seen: list[int] = []
        info = prepare(spec, on_progress=lambda progress: seen.append(progress.num_done))
        assert seen[0] == 256
        assert content(info) == content(whole)

    def test_arrays_are_resumed_too(self, tmp_path: Path) -> None:
        limits = IngestLimits(block_bytes=100, sync_interval_s=0)
        (tmp_path / "data").mkdir()
        images = colours(50, 6, 4).reshape(50, 6, 4)
        np.savez_compressed(tmp_path / "data" / "a.npz", x=images, y=np.arange(50))
        spec = PrepareSpec(str(tmp_path / "data"), str(tmp_path / "store"))
        interrupt(spec, after=17, limits=limits)
        written = Path(prepare(spec, limits=limits).path)
        assert np.array_equal(np.load(written / "images.npy"), images)
        assert np.load(written / "labels.npy").tolist() == list(range(50))


class TestPartialDataset:
    def test_second_process_waits_for_the_lock_and_then_fails(self, spec: PrepareSpec) -> None:
        interrupt(spec, after=1)
        lock = os.open(partial_directories(spec)[0], os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with pytest.raises(WorkerError, match="another csdctl is preparing the same data"):
                prepare(spec, limits=IngestLimits(lock_deadline_s=0.2))
        finally:
            os.close(lock)
        assert prepare(spec).num_samples > 0

    def test_disk_that_is_too_small_is_reported_before_the_work(self, spec: PrepareSpec) -> None:
        petabytes = replace(spec, picture=ImageRule((1_000_000, 1_000_000, 3)))
        with pytest.raises(WorkerError, match=r"1800000\.0 GB are needed, \d+\.\d GB are free") as raised:
            prepare(petabytes)
        assert (raised.value.exit_code, raised.value.remedy) == (1, "free disk space")
        assert partial_directories(spec) == []

    def test_error_of_a_disk_that_fills_up_names_no_file(self, tmp_path: Path) -> None:
        partial = PartialDataset(tmp_path / "part", "f", 0, SYNC_ALWAYS)
        partial._files[0] = FullDisk()  # type: ignore[call-overload]
        with pytest.raises(WorkerError, match="prepared data cannot be written: No space left") as raised:
            partial.append(Block(1, colours(1, 2, 2), np.zeros(1, np.int64)))
        assert raised.value.remedy == "free disk space"
        partial.discard()
        assert list(tmp_path.iterdir()) == []

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
    def test_file_has_all_blocks_however_often_it_is_reopened(
        self, tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[int, bool]]
    ) -> None:
        directory = tmp_path_factory.mktemp("store")
        partial, expected = PartialDataset(directory / "part", "f", 3, SYNC_ALWAYS), []
        for number, (count, is_reopened) in enumerate(blocks):
            expected += [number % 3] * count
            labels = np.full(count, number % 3)
            partial.append(Block(count + 1, np.full((count, 2), number, np.float32), labels))
            if is_reopened:
                partial.close()
                partial = PartialDataset(directory / "part", "f", 3, SYNC_ALWAYS)
        record = partial.record
        assert (record.num_samples, record.num_read) == (len(expected), len(expected) + len(blocks))
        assert list(record.class_counts) == [expected.count(label) for label in range(3)]
        if expected:
            info = DatasetInfo(str(directory / "whole"), len(expected), (2,), "float32", (), 2, "f")
            assert partial.finish(directory / "whole", info).images_sha256
            assert np.load(directory / "whole" / "labels.npy").tolist() == expected
            assert np.load(directory / "whole" / "images.npy", mmap_mode="r").shape == (len(expected), 2)
        else:
            partial.discard()


class FullDisk:
    """A file on a full disk."""

    def seek(self, *_: int) -> int:
        return 0

    def truncate(self) -> int:
        return 0

    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        pass


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


NUM_SAMPLES = 40 * BATCH_SIZE + 7
BEFORE_KILL = (9 * BATCH_SIZE, 20 * BATCH_SIZE)
PROGRAM = """\
import sys
import time
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.ingest.extract import extract
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json

spec = from_json(ExtractSpec, sys.stdin.readline())

def tell(progress):
    print("done", progress.num_done, flush=True)
    if progress.num_done >= int(sys.argv[1]):
        time.sleep(0.2)  # however slow this machine is, it is killed before it has computed all

extract(spec, load_backend, on_progress=tell)
"""


def run_until(spec: ExtractSpec, num_done: int) -> int:
    """Kill the group of a worker that has stored `num_done` samples; return how many it had stored."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(num_done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(to_json(spec) + "\n")
    process.stdin.close()
    stored = 0
    for line in process.stdout:  # until the end of what it has written before it was killed
        stored = int(line.split()[1])
        if num_done <= stored and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return stored


def test_killed_group_loses_at_most_its_batch(tmp_path: Path) -> None:
    images, labels = tmp_path / "images.npy", tmp_path / "labels.npy"
    generator = np.random.default_rng(0)
    np.save(images, generator.integers(0, 256, (NUM_SAMPLES, 12, 12, 3)).astype(np.uint8))
    np.save(labels, np.arange(NUM_SAMPLES, dtype=np.int32))
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (images, labels)]
    source = DatasetSlice(str(images), str(labels), images_sha256=hashes[0], labels_sha256=hashes[1])
    spec = ExtractSpec(source, str(tmp_path / "store"), prefix_in(tmp_path), Runtime())
    stored = [run_until(spec, num_done) for num_done in BEFORE_KILL]
    found = extract(spec, load_backend)
    num_kept = NUM_SAMPLES - found.num_computed
    print(f"\nkilled after {stored} of {NUM_SAMPLES} samples; {num_kept} were found")
    # What a killed worker had stored is not computed again; it was at work on one batch more.
    assert stored[0] < stored[1] <= num_kept < NUM_SAMPLES
    whole = extract(from_json(ExtractSpec, to_json(spec).replace("/store", "/other")), load_backend)
    assert (whole.parts[0].images_sha256, whole.num_computed) == (found.parts[0].images_sha256, NUM_SAMPLES)
