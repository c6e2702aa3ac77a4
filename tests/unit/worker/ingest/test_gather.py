"""Features of several machines put together: the same as one machine would have computed of all samples."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.data.prepared import rows_of
from csdctl.worker.ingest.extract import extract
from csdctl.worker.ingest.gather import gather
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.features import Extracted, ExtractSpec, Gathered, GatheredPart, GatherSpec
from csdctl.worker.protocol.run_spec import DatasetSlice
from tests.unit.worker.ingest.test_bad_features import NUM_SAMPLES, sha256, spec_in

SEED, ENDS = 7, (0, 25, 26, 26, NUM_SAMPLES)
"""Where the shards of four machines begin and end; one has no samples."""


def all_samples(directory: Path) -> ExtractSpec:
    """Return what the host alone would compute: features of all samples, as a rank reads them."""
    spec = spec_in(directory)
    return replace(spec, source=replace(spec.source, start=0, stop=NUM_SAMPLES, permutation_seed=SEED))


def compute_parts(directory: Path, wanted: ExtractSpec) -> list[GatheredPart]:
    """Return the features of four machines, each of its own shard in a store of its own."""
    parts = []
    source = wanted.source
    for number, (start, stop) in enumerate(pairwise(ENDS)):
        rows = rows_of(DatasetSlice("", "", start, stop, SEED), NUM_SAMPLES)
        shard = directory / f"shard{number}"
        shard.mkdir()
        paths = [shard / "images.npy", shard / "labels.npy"]
        for path, whole in zip(paths, (source.images, source.labels), strict=True):
            np.save(path, np.load(whole)[rows])
        images, labels = map(str, paths)
        part = DatasetSlice(images, labels, images_sha256=sha256(paths[0]), labels_sha256=sha256(paths[1]))
        (found,) = extract(
            replace(wanted, source=part, store=str(directory / f"store{number}")), load_backend
        ).parts
        path = f"{found.path}/images.npy"
        parts.append(GatheredPart(f"csd{number}", path, found.images_sha256, start, stop))
    return parts


def spec_of(wanted: ExtractSpec, parts: list[GatheredPart]) -> GatherSpec:
    return GatherSpec(wanted, (5,), tuple(parts))


def test_extract_finds_what_was_gathered(tmp_path: Path) -> None:
    wanted = all_samples(tmp_path / "host")
    parts = compute_parts(tmp_path, wanted)
    assert gather(spec_of(wanted, [])) == Gathered(is_stored=False)
    assert gather(spec_of(wanted, parts)) == Gathered(is_stored=True)
    assert gather(spec_of(wanted, [])) == Gathered(is_stored=True)
    found = extract(wanted, load_backend)
    assert found.num_computed == 0
    alone = extract(replace(wanted, store=str(tmp_path / "alone")), load_backend)
    assert alone.num_computed == NUM_SAMPLES
    assert without_path(found) == without_path(alone)


def without_path(found: Extracted) -> list[Any]:
    return [replace(part, path="") for part in found.parts]


def changed(path: str, values: Any) -> str:
    np.save(path, values)
    return sha256(Path(path))


def with_values(change: Callable[[Any], Any]) -> Callable[[list[GatheredPart]], list[GatheredPart]]:
    """Return what puts other features in place of those of the first machine."""

    def apply(parts: list[GatheredPart]) -> list[GatheredPart]:
        first, *others = parts
        return [replace(first, sha256=changed(first.path, change(np.load(first.path)))), *others]

    return apply


LIES: dict[str, tuple[Callable[[list[GatheredPart]], list[GatheredPart]], str]] = {
    "a machine is missing": (lambda parts: parts[1:], "the features of 25 of 70 samples are missing"),
    "too few rows": (with_values(lambda rows: rows[:-1]), "csd0 sent 24 features, expected 25"),
    "another shape": (with_values(lambda rows: rows[:, :4]), r"csd0 sent float32 of shape \(4,\)"),
    "another type": (with_values(lambda rows: rows.astype(np.float64)), "csd0 sent float64"),
    "not finite": (with_values(lambda rows: rows * np.inf), "csd0 sent features that are not finite"),
    "another file": (
        lambda parts: [replace(parts[0], sha256="0" * 64), *parts[1:]],
        "not the one that was prepared|has changed|SHA-256",
    ),
}


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_what_cannot_be_the_features_is_refused(
    tmp_path: Path, lie: Callable[[list[GatheredPart]], list[GatheredPart]], said: str
) -> None:
    wanted = all_samples(tmp_path / "host")
    parts = compute_parts(tmp_path, wanted)
    with pytest.raises(WorkerError, match=said):
        gather(spec_of(wanted, lie(parts)))
    assert gather(spec_of(wanted, [])) == Gathered(is_stored=False)
    assert extract(wanted, load_backend).num_computed == NUM_SAMPLES
