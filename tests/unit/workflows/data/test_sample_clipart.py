"""Pictures of openclipart as sample data: which, from where, and whose."""

import struct
from collections import Counter
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError
from csdctl.workflows.data.sample_clipart import (
    CLASSES,
    MAX_PIXELS,
    PICTURES_PER_CLASS,
    choose_pictures,
    fetch_clipart,
    split_clipart,
)
from csdctl.workflows.data.sample_parts import SampleFiles
from csdctl.workflows.data.sample_sources import DatasetOrigin


def write_picture(path: Path, width: int, height: int = 1) -> None:
    """Write the beginning of a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", width, height)
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    for name in CLASSES:
        for number in range(PICTURES_PER_CLASS + 5):
            write_picture(directory / name / ("deep" if number % 2 else ".") / f"{number:03}.png", number + 1)
    write_picture(directory / "animals" / "large.png", MAX_PIXELS, 2)
    (directory / "animals" / "damaged.png").write_bytes(b"no picture")
    return directory


def test_same_pictures_are_chosen_of_each_class(pictures: Path) -> None:
    chosen = choose_pictures(pictures)
    assert chosen == choose_pictures(pictures)
    assert Counter(name.partition("/")[0] for name in chosen) == dict.fromkeys(CLASSES, PICTURES_PER_CLASS)
    assert not {"animals/large.png", "animals/damaged.png"} & set(chosen)


def test_second_fetch_needs_no_source_and_has_the_same_pictures(pictures: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    source = DatasetOrigin("elsewhere", lambda _scratch, _say: pictures)
    first = fetch_clipart(tmp_path / "cache", say=messages.append, sources=[source])
    again = fetch_clipart(tmp_path / "cache", say=messages.append, sources=[])
    assert again == first
    assert all((tmp_path / "cache" / name).is_file() for name in first.files)
    assert messages == []


def test_without_a_network_the_error_says_what_to_install(tmp_path: Path) -> None:
    def fail(_scratch: Path, _say: object) -> Path:
        raise CsdctlError("apt-get ended with 100: E: Failed to fetch")

    with pytest.raises(CsdctlError) as raised:
        fetch_clipart(tmp_path, say=print, sources=[DatasetOrigin("apt-get download", fail)])
    assert "openclipart was not found and could not be downloaded" in raised.value.message
    assert "apt-get download: apt-get ended with 100: E: Failed to fetch" in raised.value.message
    assert raised.value.remedy.startswith("install Debian's package openclipart-png, or copy its folders")


@pytest.mark.parametrize(("num_nodes", "fraction", "sizes"), [(3, 1 / 7, [65, 64, 64]), (2, 0.0, [0, 0])])
def test_each_picture_has_one_owner(num_nodes: int, fraction: float, sizes: list[int]) -> None:
    pictures = SampleFiles(Path(), tuple(f"food/{number}.png" for number in range(1800)))
    split = split_clipart(pictures, num_nodes=num_nodes, private_fraction=fraction, seed=7)
    parts = [split.public, split.validation, *split.private]
    assert sorted(name for part in parts for name in part.names()) == sorted(pictures.files)
    assert len(split.validation) == 450
    assert sorted((len(part) for part in split.private), reverse=True) == sizes
    other = split_clipart(pictures, num_nodes=num_nodes, private_fraction=fraction, seed=8)
    assert other.public != split.public


def test_pictures_are_copied_into_class_folders(pictures: Path, tmp_path: Path) -> None:
    part = SampleFiles(pictures, choose_pictures(pictures)[:3])
    part.save(tmp_path)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.png")}
    assert found == {name: (pictures / name).read_bytes() for name in part.files}
