"""An interrupted `prepare` goes on where it was, and whoever prepares gets the same bytes."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.worker.ingest import partial_dataset as part_module
from csdctl.worker.ingest.partial_dataset import Part
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.ingest.sources import source as source_module
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, ImageRule, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from tests.unit.worker.ingest.sources.made_pictures import colours, png

NUM_PICTURES = 600


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of 600 pictures in two classes, every seventh of them damaged."""
    root = tmp_path_factory.mktemp("pictures")
    for name in ("cat", "dog"):
        (root / name).mkdir()
    for number in range(NUM_PICTURES):
        content = png(colours(8 + number % 5, 9, seed=number))
        kept = len(content) - 40 * (number % 7 == 0)
        (root / ("cat", "dog")[number % 2] / f"{number}.png").write_bytes(content[:kept])
    return root


@pytest.fixture
def spec(pictures: Path, tmp_path: Path) -> PrepareSpec:
    return PrepareSpec(str(pictures), str(tmp_path / "store"), ImageRule((5, 5, 3)), names_classes=True)


@pytest.fixture(scope="module")
def whole(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    """What `spec` asks for, prepared without an interruption by one thread."""
    store = str(tmp_path_factory.mktemp("whole"))
    return prepare(PrepareSpec(str(pictures), store, ImageRule((5, 5, 3)), names_classes=True), threads=1)


def content(info: DatasetInfo) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(info.path).iterdir() if path.suffix == ".npy"}


def parts(spec: PrepareSpec) -> list[Path]:
    return list(Path(spec.store).glob(".part-*"))


class StopHereError(Exception):
    """In place of a power cut."""


def interrupt(spec: PrepareSpec, after: int, sync_interval_s: float = 0) -> None:
    def stop(progress: PrepareProgress) -> None:
        if progress.num_done >= after:
            raise StopHereError

    with pytest.raises(StopHereError):
        prepare(spec, sync_interval_s=sync_interval_s, on_progress=stop)


class TestSameBytes:
    @pytest.mark.parametrize("threads", [2, 5])
    def test_any_number_of_threads_gives_the_same_bytes(
        self, spec: PrepareSpec, whole: DatasetInfo, threads: int
    ) -> None:
        many = prepare(spec, threads=threads)
        assert content(many) == content(whole)
        assert replace(many, path="") == replace(whole, path="")
        assert whole.num_skipped == {"undecodable": len(range(0, NUM_PICTURES, 7))}

    def test_any_size_of_blocks_gives_the_same_bytes(
        self, spec: PrepareSpec, whole: DatasetInfo, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(source_module, "BLOCK_SAMPLES", 7)
        assert content(prepare(spec)) == content(whole)

    def test_another_rule_is_another_data_set(self, spec: PrepareSpec) -> None:
        rules = [ImageRule((5, 5, 3)), ImageRule((5, 5, 1)), ImageRule((5, 5, 3), "pad")]
        rules.append(ImageRule((5, 5, 3), max_pixels=80))
        made = [prepare(replace(spec, picture=rule)) for rule in rules]
        made.append(prepare(replace(spec, classes=("dog", "cat"))))
        assert len({info.fingerprint for info in made}) == 5
        assert prepare(spec) == made[0]


class TestGoingOn:
    @pytest.mark.parametrize("after", [1, 256, 512])
    def test_what_was_done_is_not_done_again_and_the_bytes_are_the_same(
        self, spec: PrepareSpec, whole: DatasetInfo, after: int
    ) -> None:
        interrupt(spec, after)
        seen: list[int] = []
        info = prepare(spec, on_progress=lambda progress: seen.append(progress.num_done))
        assert seen[0] >= after
        assert content(info) == content(whole)
        assert replace(info, path="") == replace(whole, path="")
        assert parts(spec) == []

    def test_what_was_written_behind_the_last_record_is_cut_off(
        self, spec: PrepareSpec, whole: DatasetInfo
    ) -> None:
        interrupt(spec, after=1)
        for name in ("images.npy", "labels.npy"):
            with (parts(spec)[0] / name).open("ab") as file:
                file.write(b"half a sample")
        assert content(prepare(spec)) == content(whole)

    @pytest.mark.parametrize("record", ["", "{", "[]", '{"fingerprint": "another"}'])
    def test_with_a_record_that_is_of_no_use_it_begins_again(
        self, spec: PrepareSpec, whole: DatasetInfo, record: str
    ) -> None:
        interrupt(spec, after=1)
        (parts(spec)[0] / "record.json").write_text(record)
        assert content(prepare(spec)) == content(whole)

    def test_part_of_data_that_has_changed_since_is_dropped(
        self, spec: PrepareSpec, pictures: Path, tmp_path: Path
    ) -> None:
        root = tmp_path / "copy"
        shutil.copytree(pictures, root)
        changing = replace(spec, source=str(root))
        interrupt(changing, after=1)
        (root / "cat" / "0.png").unlink()
        info = prepare(changing)
        assert info.num_samples + sum(info.num_skipped.values()) == NUM_PICTURES - 1
        assert parts(changing) == []

    def test_killed_worker_is_gone_on_with(self, spec: PrepareSpec, whole: DatasetInfo) -> None:
        program = (
            "import os, signal, sys\n"
            "from csdctl.worker.protocol.datasets import PrepareSpec\n"
            "from csdctl.worker.protocol.json_codec import from_json\n"
            "from csdctl.worker.ingest.prepare import prepare\n"
            "def stop(progress):\n"
            "    if progress.num_done >= 256:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "prepare(from_json(PrepareSpec, sys.argv[1]), sync_interval_s=0, on_progress=stop)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, to_json(spec)], check=False, capture_output=True
        )
        assert done.returncode == -signal.SIGKILL
        seen: list[int] = []
        info = prepare(spec, on_progress=lambda progress: seen.append(progress.num_done))
        assert seen[0] == 256
        assert content(info) == content(whole)

    def test_arrays_are_gone_on_with_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("csdctl.worker.ingest.sources.arrays.BLOCK_BYTES", 100)
        (tmp_path / "data").mkdir()
        images = colours(50, 6, 4).reshape(50, 6, 4)
        np.savez_compressed(tmp_path / "data" / "a.npz", x=images, y=np.arange(50))
        spec = PrepareSpec(str(tmp_path / "data"), str(tmp_path / "store"))
        interrupt(spec, after=17)
        written = Path(prepare(spec).path)
        assert np.array_equal(np.load(written / "images.npy")[..., 0], images)
        assert np.load(written / "labels.npy").tolist() == list(range(50))


class TestPart:
    def test_another_process_waits_and_is_then_told(
        self, spec: PrepareSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(part_module, "LOCK_DEADLINE_S", 0.2)
        interrupt(spec, after=1)
        lock = os.open(parts(spec)[0], os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with pytest.raises(WorkerError, match="another csdctl prepares the same data"):
                prepare(spec)
        finally:
            os.close(lock)
        assert prepare(spec).num_samples > 0

    def test_full_disk_is_said_before_the_work(
        self, spec: PrepareSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(Path.cwd())
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(WorkerError, match="it takes 0.0 GB, 0.0 GB are free") as raised:
            prepare(spec)
        assert (raised.value.exit_code, raised.value.remedy) == (1, "make room on the disk")
        assert parts(spec) == []

    def test_disk_that_fills_up_is_an_error_that_names_no_file(self, tmp_path: Path) -> None:
        part = Part(tmp_path / "part", "f", 0)
        part._files[0] = FullDisk()  # type: ignore[call-overload]
        with pytest.raises(WorkerError, match="prepared data cannot be written: No space left") as raised:
            part.append(Block(1, colours(1, 2, 2), np.zeros(1, np.int64)), sync_interval_s=0)
        assert raised.value.remedy == "make room on the disk"
        part.discard()
        assert list(tmp_path.iterdir()) == []

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
    def test_however_blocks_come_and_it_is_reopened_the_file_is_their_sum(
        self, tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[int, bool]]
    ) -> None:
        directory = tmp_path_factory.mktemp("store")
        part, expected = Part(directory / "part", "f", 3), []
        for number, (count, is_reopened) in enumerate(blocks):
            expected += [number % 3] * count
            labels = np.full(count, number % 3)
            part.append(Block(count + 1, np.full((count, 2), number, np.float32), labels), sync_interval_s=0)
            if is_reopened:
                part.close()
                part = Part(directory / "part", "f", 3)
        record = part.record
        assert (record.num_samples, record.num_read) == (len(expected), len(expected) + len(blocks))
        assert list(record.class_counts) == [expected.count(label) for label in range(3)]
        if expected:
            part.finish(directory / "whole", "{}")
            assert np.load(directory / "whole" / "labels.npy").tolist() == expected
            assert np.load(directory / "whole" / "images.npy", mmap_mode="r").shape == (len(expected), 2)
        else:
            part.discard()


class FullDisk:
    """A file on a disk without room."""

    def seek(self, *_: int) -> int:
        return 0

    def truncate(self) -> int:
        return 0

    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        pass


def test_worker_whose_csdctl_is_gone_ends(spec: PrepareSpec, tmp_path: Path) -> None:
    function = tmp_path / "slow.py"
    function.write_text("import time\n\n\ndef load(path):\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "csdctl.worker", "prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(to_json(replace(spec, function=f"{function}:load")).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"@csdctl-working ")
    process.stdout.close()
    started = time.monotonic()
    try:
        assert process.wait(30) == 1
    finally:
        process.kill()
    assert time.monotonic() - started < 30
