"""What TensorFlow reads, by its C library: PNG, JPEG, and the records of TFRecord files."""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from csdctl.worker.engine.protobuf import encode_field
from csdctl.worker.engine.tensorflow_c import (
    OUT_OF_RANGE,
    STRING,
    TYPES,
    Function,
    FunctionInfo,
    GraphSession,
    TensorFlowError,
)
from csdctl.worker.protocol.run_spec import Runtime

PNG, RGBA = "png", "rgba"
JPEG_RATIOS = {ratio: f"jpeg_{ratio}" for ratio in (1, 2, 4, 8)}
"""Names of the decoders that reduce a picture by a factor."""
BUFFER_BYTES = 256 << 10
"""What is read of a TFRecord file at once, as by tf.data.TFRecordDataset."""


def _node(name: str, operation: str, inputs: Sequence[str], **attributes: bytes) -> bytes:
    """Return a node of a GraphDef. `attributes` are messages of the type AttrValue."""
    texts = ((1, name), (2, operation), *((3, source) for source in inputs))
    fields = [encode_field(number, text.encode()) for number, text in texts]
    for key, value in attributes.items():
        fields.append(encode_field(5, encode_field(1, key.encode()) + encode_field(2, value)))
    return encode_field(1, b"".join(fields))


def _bytes(value: bytes) -> bytes:
    return encode_field(2, value)


def _int(value: int) -> bytes:
    return encode_field(3, value)


def _type(number: int) -> bytes:
    return encode_field(6, number)


def _placeholder(name: str, number: int = STRING) -> bytes:
    return _node(name, "Placeholder", (), dtype=_type(number))


def _open(nodes: Sequence[bytes]) -> GraphSession:
    """Return a session that computes in the threads of its callers, as many as they have."""
    return GraphSession(b"".join(nodes), Runtime(), in_caller=True)


@cache
def load_decoders() -> dict[str, Function]:
    """Return thread-safe functions of encoded bytes that return pixels (h, w, c) or raise TensorFlowError."""
    content, exact = ("content",), _bytes(b"INTEGER_ACCURATE")
    nodes = {name: _node(name, "DecodePng", content, channels=_int(n)) for name, n in ((PNG, 0), (RGBA, 4))}
    for ratio, name in JPEG_RATIOS.items():
        options = {"channels": _int(3), "ratio": _int(ratio), "dct_method": exact}
        nodes[name] = _node(name, "DecodeJpeg", content, **options)
    session = _open([_placeholder(*content), *nodes.values()])
    return {name: session.find(name, FunctionInfo(content, (name,))) for name in nodes}


class RecordReader:
    """Reads TFRecord files, one after the other."""

    def __init__(self) -> None:
        """Raise WorkerError without TensorFlow's libraries."""
        elements = {
            "output_types": encode_field(1, _type(STRING)),
            "output_shapes": encode_field(1, encode_field(7, b"")),  # scalars
        }
        feeds, empty = ("filename", "compression", "buffer_bytes"), _bytes(b"")
        session = _open(
            [
                *map(_placeholder, feeds[:2]),
                _placeholder(feeds[2], TYPES["int64"]),
                _node("records", "TFRecordDataset", feeds),
                _node("iterator", "IteratorV2", (), shared_name=empty, container=empty, **elements),
                _node("begin", "MakeIterator", ["records", "iterator"]),
                _node("next", "IteratorGetNext", ["iterator"], **elements),
            ]
        )
        self._begin = session.find("begin", FunctionInfo(feeds, (), ("begin",)))
        self._next = session.find("next", FunctionInfo((), ("next",)))

    def read(self, path: Path, compression: str = "") -> Iterator[bytes]:
        """Yield the records of a file, `compression` '' or 'GZIP'. Raises TensorFlowError for damage."""
        self._begin(os.fsencode(path), compression.encode(), np.array(BUFFER_BYTES, np.int64))
        while True:
            try:
                record = self._next().string(0)
            except TensorFlowError as error:
                if error.code == OUT_OF_RANGE:
                    return
                raise
            yield record
