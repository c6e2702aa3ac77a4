"""Digests by which machines compare the data they see."""

from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import compute_digest


def write(directory: Path, images: np.ndarray, labels: np.ndarray) -> str:
    directory.mkdir()
    np.save(directory / "images.npy", images)
    np.save(directory / "labels.npy", labels)
    return str(directory)


def test_equal_data_has_equal_digests_and_different_data_has_not(tmp_path: Path) -> None:
    images = np.random.default_rng(3).integers(0, 256, (200, 3, 3, 1), np.uint8)
    labels = np.arange(200) % 5
    first = compute_digest(write(tmp_path / "a", images, labels))
    assert first.num_samples == 200
    assert compute_digest(write(tmp_path / "b", images.copy(), labels)) == first
    other = images.copy()
    other[-1] += 1
    assert compute_digest(write(tmp_path / "c", other, labels)) != first
    assert compute_digest(write(tmp_path / "d", images, labels[::-1])) != first
    assert compute_digest(write(tmp_path / "e", images[:100], labels[:100])) != first
