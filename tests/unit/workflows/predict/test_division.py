"""A part of the public samples: which rows it has, on whichever machine it is predicted."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from csdctl.job.model import load_job
from csdctl.shipping.store import StoredFile
from csdctl.worker.data.prepared import rows_of
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.worker.protocol.run_spec import DatasetSlice, Runtime
from csdctl.workflows.data.model import SerializedModel
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.predict.division import Part, on_host

SEED = 7
NUM_PUBLIC = 50


@pytest.fixture
def prepared() -> Prepared:
    file = StoredFile("a" * 64, ".npz", Path("file"))
    info = DatasetInfo(
        "public", NUM_PUBLIC, (4,), "float32", (), 1, "ab", images_sha256="c", labels_sha256="d"
    )
    model = SerializedModel(ModelInfo("model.keras", (4,), (2,), 1, 1, "softmax"), file, file)
    return Prepared(file, model, info, None, {})


def part_of(machine: str, start: int, count: int) -> Part:
    source = DatasetSlice("shard.npy", "labels.npy")
    return Part("public", "host", machine, source, count, Runtime(), start, files=())


def test_parts_have_every_public_row_once(prepared: Prepared) -> None:
    parts = [part_of("host", 0, 20), part_of("csd0", 20, 13), part_of("csd1", 33, 17)]
    rows = np.concatenate([part.rows(prepared, SEED) for part in parts])
    assert sorted(rows.tolist()) == list(range(NUM_PUBLIC))


def test_host_that_takes_over_reads_the_rows_that_the_node_had(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "trained.keras").touch()
    (tmp_path / "job.yaml").write_text(
        f"model: trained.keras\ndata: {{public: {{path: x}}}}\nrecipe: {{epochs: 1, seed: {SEED}}}\n"
    )
    part = part_of("csd1", 33, 17)
    taken = on_host(part, prepared, load_job(tmp_path / "job.yaml"), Runtime(2))
    assert (taken.machine, taken.owner, taken.runtime.threads) == ("host", "host", 2)
    assert rows_of(taken.source, NUM_PUBLIC).tolist() == part.rows(prepared, SEED).tolist()
    assert taken.source.images_sha256 == "c"


def test_parts_are_named_by_data_or_node() -> None:
    assert [part_of(name, 0, 1).label for name in ("host", "csd0")] == ["public", "public on csd0"]
    assert dataclasses.replace(part_of("csd0", 0, 1), data="private").label == "csd0"
