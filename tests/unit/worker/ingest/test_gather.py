"""Features of several machines put together: the same as one machine would have computed of all samples."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.data.prepared import rows_of
from csdctl.worker.ingest.extract import extract, gather
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.features import ExtractSpec, Gathered, GatheredPart, GatherSpec
from csdctl.worker.protocol.run_spec import DatasetSlice
from tests.unit.worker.ingest.prepared_data import NUM_SAMPLES, extract_spec, sha256, slice_of

SEED, ENDS = 7, (0, 25, 26, 26, NUM_SAMPLES)
"""Where the shards of four machines begin and end; one has no samples."""
Lie = Callable[[list[GatheredPart]], list[GatheredPart]]


@pytest.fixture
def wanted(tmp_path: Path) -> ExtractSpec:
    """Return what the host alone would compute: features of all samples, as a rank reads them."""
    spec = extract_spec(tmp_path / "host")
    return replace(spec, source=replace(spec.source, start=0, stop=NUM_SAMPLES, permutation_seed=SEED))


@pytest.fixture
def parts(tmp_path: Path, wanted: ExtractSpec) -> list[GatheredPart]:
    """Return the features of four machines, each of its own shard in a store of its own."""
    found = []
    for number, (start, stop) in enumerate(pairwise(ENDS)):
        rows = rows_of(DatasetSlice("", "", start, stop, SEED), NUM_SAMPLES)
        shard = tmp_path / f"shard{number}"
        shard.mkdir()
        np.save(shard / "images.npy", np.load(wanted.source.images)[rows])
        np.save(shard / "labels.npy", np.load(wanted.source.labels)[rows])
        (info,) = extract(replace(wanted, source=slice_of(shard), store=str(shard / "store"))).parts
        found.append(GatheredPart(f"csd{number}", f"{info.path}/images.npy", info.images_sha256, start, stop))
    return found


def gather_parts(wanted: ExtractSpec, *parts: GatheredPart) -> Gathered:
    return gather(GatherSpec(wanted, (5,), parts))


def test_extract_finds_what_was_gathered(
    wanted: ExtractSpec, parts: list[GatheredPart], tmp_path: Path
) -> None:
    assert gather_parts(wanted) == Gathered(is_stored=False)
    assert gather_parts(wanted, *parts) == gather_parts(wanted) == Gathered(is_stored=True)
    found, alone = extract(wanted), extract(replace(wanted, store=str(tmp_path / "alone")))
    assert (found.num_computed, alone.num_computed) == (0, NUM_SAMPLES)
    assert [replace(part, path="") for part in found.parts] == [
        replace(part, path="") for part in alone.parts
    ]


def with_values(change: Callable[[Any], Any]) -> Lie:
    """Return what puts other features in place of those of the first machine."""

    def apply(parts: list[GatheredPart]) -> list[GatheredPart]:
        first, *others = parts
        np.save(first.path, change(np.load(first.path)))
        return [replace(first, sha256=sha256(Path(first.path))), *others]

    return apply


LIES: dict[str, tuple[Lie, str]] = {
    "a machine is missing": (lambda parts: parts[1:], "the features of 25 of 70 samples are missing"),
    "another shape": (
        with_values(lambda rows: rows[:, :4]),
        r"csd0 sent float32 of shape \(\d+, 4\), expected",
    ),
    "not finite": (with_values(lambda rows: rows * np.inf), "csd0 sent features that are not finite"),
    "another file": (
        lambda parts: [replace(parts[0], sha256="0" * 64), *parts[1:]],
        "SHA-256|not",
    ),
}


@pytest.mark.parametrize(("lie", "said"), LIES.values(), ids=LIES)
def test_what_cannot_be_the_features_is_refused(
    wanted: ExtractSpec, parts: list[GatheredPart], lie: Lie, said: str
) -> None:
    with pytest.raises(WorkerError, match=said):
        gather_parts(wanted, *lie(parts))
    assert gather_parts(wanted) == Gathered(is_stored=False)
    assert extract(wanted).num_computed == NUM_SAMPLES
