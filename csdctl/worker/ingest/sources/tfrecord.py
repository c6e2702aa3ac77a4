"""TFRecord files, plain or gzip, of tf.train.Example with the features that the job names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.pictures import PictureDecoder, known_shape
from csdctl.worker.ingest.sources.source import Block, EncodedSample, UnusableError, decode_blocks
from csdctl.worker.ingest.sources.tree import DataFile, Tree
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec, RecordSchema

_SHARD = re.compile(r".+(\.tfrecords?|\.tfrec|-\d{5}-of-\d{5})(\.gz)?$")


def is_shard(file: DataFile, tree: Tree) -> bool:
    """Whether a file has the name of a TFRecord file: x.tfrecord, x-00000-of-00010, …"""
    return bool(_SHARD.match(file.name if file.parts else tree.root.name))


class RecordFiles:
    """The examples of TFRecord files, in order of their paths."""

    num_samples = 0
    files_of_class: tuple[int, ...] = ()

    def __init__(self, tree: Tree, spec: PrepareSpec, threads: int) -> None:
        """Raises WorkerError, exit code 2, when the job has no schema, or one that does not hold together."""
        if spec.records is None:
            raise WorkerError(
                f"data at {spec.source} is TFRecord files, and the job does not say what is in them",
                remedy="say data.tfrecord in job.yaml: {image: FEATURE, label: FEATURE}",
                exit_code=2,
            )
        self.class_names = spec.classes
        self._label_of = {name: label for label, name in enumerate(spec.classes or ())}
        self._schema: RecordSchema = spec.records
        self._paths = [tree.path_of(file) for file in tree.files if is_shard(file, tree)]
        self._threads = threads
        self._tf = load_tensorflow()
        is_fitted = self._schema.shape is None or (
            self._schema.dtype == "uint8" and len(self._schema.shape) == 3 and known_shape(spec.picture)
        )
        self._decoder = PictureDecoder(spec.picture, self._tf) if is_fitted else None
        self.sample_bytes = (
            self._decoder.sample_bytes
            if self._decoder
            else int(np.prod(self._schema.shape or ())) * np.dtype(self._schema.dtype).itemsize
        )

    def blocks(self, start: int) -> Iterator[Block]:
        """All examples from the one numbered `start` on."""
        return decode_blocks(
            self._candidates(start), self._decode, threads=self._threads, sample_bytes=self.sample_bytes
        )

    def _candidates(self, start: int) -> Iterator[EncodedSample]:
        number = 0
        for path in self._paths:
            for record in self._records(path):
                if number >= start:
                    yield EncodedSample(record, None)
                number += 1

    def _records(self, path: Path) -> Iterator[bytes | None]:
        """The records of a file; a None at the end when the rest of it cannot be read."""
        try:
            for record in self._tf.data.TFRecordDataset(str(path), compression_type=self._compression(path)):
                yield record.numpy()
        except (self._tf.errors.OpError, OSError):
            yield None

    def _compression(self, path: Path) -> str:
        """'GZIP' or ''. A plain file may begin like a gzip one, by the length of its first record."""
        with path.open("rb") as file:
            if file.read(3) != b"\x1f\x8b\x08":
                return ""
        try:
            next(iter(self._tf.data.TFRecordDataset(str(path))))
        except (self._tf.errors.OpError, StopIteration):
            return "GZIP"
        return ""

    def _decode(self, candidate: EncodedSample) -> tuple[Array, Any]:
        if candidate.content is None:
            raise UnusableError("damaged_file")
        try:
            example = self._tf.train.Example.FromString(candidate.content)
        except Exception:  # protobuf's own error, whose module is no part of TensorFlow's names
            raise UnusableError("undecodable") from None
        features = example.features.feature
        if self._schema.image not in features or self._schema.label not in features:
            raise UnusableError("no_feature")
        return self._image(features[self._schema.image]), self._label(features[self._schema.label])

    def _image(self, feature: Any) -> Array:
        if self._schema.shape is None:
            assert self._decoder is not None
            if len(feature.bytes_list.value) != 1:
                raise UnusableError("undecodable")
            return self._decoder.decode(feature.bytes_list.value[0])
        picture = self._raw(feature, self._schema.shape)
        return self._decoder.fit(picture) if self._decoder else picture

    def _raw(self, feature: Any, shape: tuple[int, ...]) -> Array:
        try:
            if feature.bytes_list.value:
                flat = np.frombuffer(feature.bytes_list.value[0], self._schema.dtype)
            else:
                numbers = feature.float_list.value or feature.int64_list.value
                flat = np.asarray(numbers, self._schema.dtype)
            return flat.reshape(shape)
        except (ValueError, OverflowError):
            raise UnusableError("undecodable") from None

    def _label(self, feature: Any) -> Any:
        """A whole number, or the name of one of the job's classes."""
        if len(feature.int64_list.value) == 1:
            return int(feature.int64_list.value[0])
        if len(feature.bytes_list.value) == 1:
            name = feature.bytes_list.value[0].decode(errors="replace")
            if name in self._label_of:
                return self._label_of[name]
        raise UnusableError("no_label")
