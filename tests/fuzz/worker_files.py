"""Files that a worker reads: prepared data, data of the user's, checkpoints, weights."""

import contextlib
import io
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import is_numeric, map_array
from csdctl.worker.data.schedule import Span
from csdctl.worker.ingest.partial_dataset import PartialDataset, find_stored
from csdctl.worker.ingest.sources.arrays import ArraySource, open_npz
from csdctl.worker.ingest.sources.images import open_image
from csdctl.worker.ingest.sources.source import Block
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.tasks.checkpointer import Checkpoints, StepFile
from csdctl.worker.tasks.progress import _HEAD, max_state_bytes, pack, unpack
from tests.fuzz.target import Form, Target
from tests.unit.worker.tasks.test_checkpointer import OWN, POSITION

FINGERPRINT = "f" * 32
NPY_WORDS = (
    *b"'descr': ;'|u1';'<f8';'|V0';'|S0';'|O';'<M8[s]';'<U9999999';'<f2';None".split(b";"),
    *b"[('a', '<f4', (2,)), ('b', '<i8')];'fortran_order': True;'shape': ()".split(b";"),
    *b"(0, 1180591620717411303424);(9223372036854775807, 0);(1099511627776, 0);(-1,)".split(b";"),
    *b"(True,);(0, 99999999999999999999999);(1, 2, 3);(0x10,);(1e3,);10000000000;L".split(b";"),
    *b"\x93NUMPY\x01\x00;\x93NUMPY\x02\x00;\x93NUMPY\x03\x00;((((;))));{;};'''".split(b";"),
)
ZIP_WORDS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")


@cache
def _values() -> list[Any]:
    return [np.zeros((3, 4), np.float32), np.array(0), np.zeros(50, np.float32)]


@cache
def _packed() -> bytes:
    return pack(_values(), POSITION).tobytes()


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def _npy_seeds() -> list[bytes]:
    records = np.zeros(3, [("a", "<f4", (2,)), ("b", "<i8")])
    arrays = (np.arange(6, dtype=np.uint8).reshape(3, 2), np.asfortranarray(np.ones((2, 3))), records)
    return [_npy(array) for array in (*arrays, np.zeros((0, 4), np.int32), np.zeros((4, 0), np.float16))]


def _array(content: bytes, directory: Path) -> None:
    (directory / "images.npy").write_bytes(content)
    is_numeric(map_array(directory / "images.npy").dtype)


def _read(source: ArraySource) -> None:
    for block in source.blocks(0):
        str(block.samples.shape)


def _spec(directory: Path) -> PrepareSpec:
    return PrepareSpec("data", str(directory))


def _npz(content: bytes, directory: Path) -> None:
    path = directory / "data.npz"
    path.write_bytes(content)
    _read(open_npz(path, _spec(directory)))


def _npz_seeds() -> list[bytes]:
    x, y = np.ones((3, 2), np.float32), np.arange(3)
    kinds: tuple[dict[str, Any], ...] = (
        {"x": x, "y": y},
        {"a": x, "b": x.astype(np.uint8), "y": y},
        {"x": np.asfortranarray(x), "y": y},
    )
    return [archive for arrays in kinds for archive in _archives(**arrays)]


def _archives(**arrays: Any) -> list[bytes]:
    """Return an archive of the arrays, uncompressed and compressed."""
    files = io.BytesIO(), io.BytesIO()
    np.savez(files[0], **arrays)
    np.savez_compressed(files[1], **arrays)
    return [file.getvalue() for file in files]


def _npz_header(content: bytes, directory: Path) -> None:
    """Take both members of an archive, whose CRC is right."""
    with zipfile.ZipFile(directory / "data.npz", "w") as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", content)
    _read(open_npz(directory / "data.npz", _spec(directory)))


def _image_header(content: bytes, directory: Path) -> None:
    image = open_image(content)
    if image and image.width * image.height < 1 << 20:
        with contextlib.suppress(OSError, SyntaxError, ValueError, LookupError, EOFError):
            image.load()


def _image_seeds() -> list[bytes]:
    png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + struct.pack(">II", 64, 64) + b"\x08\x02\0\0\0"
    jpeg = b"\xff\xd8\xff\xe0\0\x04ab\xff\xdb\0\x04cd\xff\xc0\0\x0b\x08\0\x40\0\x40\x03\x01\x11\0"
    bmp = b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 64, -64, 1, 24, 0) + bytes(20)
    gif = b"GIF89a" + struct.pack("<HH", 2, 2) + b"\x80\0\0" + bytes(6) + b"\x21\xf9\x04\x01\0\0\0\0"
    return [png, jpeg, bmp, gif + b"\x2c" + struct.pack("<HHHH", 0, 0, 2, 2) + b"\0\x02\x02\x44\x01\0\x3b"]


def _prepared(content: bytes, directory: Path) -> None:
    target = directory / "store" / FINGERPRINT
    if not target.exists():
        target.mkdir(mode=0o700, parents=True)
        source = directory / "data"
        source.mkdir()
        for name in ("images.npy", "labels.npy"):
            (source / name).write_bytes(_npy(np.arange(3)))
    (target / "dataset.json").write_bytes(content)
    find_stored(target, (target, directory / "data"), is_checked=True)


def _info_seeds() -> list[bytes]:
    info = DatasetInfo("data", 3, (2,), "uint8", (), 2, FINGERPRINT, {"undecodable": 1}, {"a": 3}, ("b",))
    return [to_json(info).encode()]


@cache
def _partial_files() -> dict[str, bytes]:
    """Return the files of a data set whose preparing was interrupted."""
    with tempfile.TemporaryDirectory() as directory:
        partial = PartialDataset(Path(directory, "part"), FINGERPRINT, ("a", "b"))
        partial.append(Block(np.ones((3, 2), np.uint8), np.arange(3)))
        partial.sync()
        partial.close()
        return {path.name: path.read_bytes() for path in Path(directory, "part").iterdir()}


def _resume(directory: Path, changed: str, content: bytes) -> None:
    place = directory / "part"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    files = {**_partial_files(), changed: content}
    for name, written in files.items():
        (place / name).write_bytes(written)
    partial = PartialDataset(place, FINGERPRINT, ("a", "b"))
    try:
        partial.append(Block(np.ones((1, 2), np.uint8), np.arange(1)))
    finally:
        partial.close()


def _checkpoint(content: bytes, directory: Path) -> None:
    (directory / "step-00000001.npz").write_bytes(content)
    for state in Checkpoints(directory).newest_first(max_state_bytes(_values())):
        unpack(state, _values(), OWN)


def _state(content: bytes, directory: Path) -> None:
    unpack(np.frombuffer(content, np.uint8), _values(), OWN)


def _position(content: bytes, directory: Path) -> None:
    """Take the position of a state whose head and variables are right."""
    length, total, form = _HEAD.unpack(_packed()[: _HEAD.size])
    rest = _packed()[_HEAD.size + length :]
    head = _HEAD.pack(len(content), total - length + len(content), form)
    position, _ = unpack(np.frombuffer(head + content + rest, np.uint8), _values(), OWN)
    pack(_values(), position)
    if position.segment:
        for share in position.segment.shares:
            str((share.num_steps, share.batch(0), share.after(2), [Span(0, 0, 1)]))


def _step_file(content: bytes, directory: Path) -> None:
    """Take the beginnings of both halves of a step file, of equal lengths."""
    path = directory / "step"
    size = 2 * StepFile(path, _values())._half_bytes
    half = len(content) // 2
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, content[:half], 0)
        os.pwrite(descriptor, content[half:], size // 2)
    finally:
        os.close(descriptor)
    state = StepFile(path, _values()).read()
    if state is not None:
        unpack(state, _values(), OWN)


def _step_seeds() -> list[bytes]:
    heads = [struct.pack("<qq", step, len(_packed())) for step in (45, 44)]
    return [b"".join(head + struct.pack("<I", zlib.crc32(head + _packed())) + _packed() for head in heads)]


FILE_ERRORS = (OSError, ValueError, WorkerError)
REFUSED = (WorkerError,)


def _resumed(name: str, form: Form, words: tuple[bytes, ...] = ()) -> Target:
    """Return the target of one file of a data set whose preparing was interrupted."""

    def take(content: bytes, directory: Path) -> None:
        _resume(directory, name, content)

    target = "resume-record" if form == Form.JSON else "resume-array"
    return Target(target, form, take, REFUSED, lambda: [_partial_files()[name]], words)


TARGETS = (
    Target("array", Form.BINARY, _array, FILE_ERRORS, _npy_seeds, NPY_WORDS),
    Target("npz", Form.BINARY, _npz, REFUSED, _npz_seeds, (*ZIP_WORDS, b"x.npy", b"y.npy")),
    Target("npz-member", Form.BINARY, _npz_header, REFUSED, _npy_seeds, NPY_WORDS),
    Target("image-header", Form.BINARY, _image_header, (ValueError, IndexError), _image_seeds),
    Target("prepared-info", Form.JSON, _prepared, (), _info_seeds),
    _resumed("record.json", Form.JSON),
    _resumed("images.npy", Form.BINARY, NPY_WORDS),
    Target(
        *("checkpoint", Form.BINARY, _checkpoint, REFUSED),
        lambda: _archives(state=np.frombuffer(_packed(), np.uint8)),
        (*ZIP_WORDS, b"state.npy"),
    ),
    Target("state", Form.BINARY, _state, REFUSED, lambda: [_packed()]),
    Target("position", Form.JSON, _position, REFUSED, lambda: [to_json(POSITION).encode()]),
    Target("step-file", Form.BINARY, _step_file, REFUSED, _step_seeds),
)
