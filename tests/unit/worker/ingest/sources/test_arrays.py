"""Tables of .csv files: numbers only, as one vector or as an input for each column."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec, TableSchema
from tests.unit.worker.ingest.prepared_data import SECRET, arrays_of, refusal, spec_below

TABLE = "id,age,pulse,name,target,weight\n1,63,150.5,ann,1,0.5\n2,37,187,bob,0,2\n3,41,172,eve,1,1\n"


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    spec = spec_below(tmp_path, table=TableSchema(("target",), "", ("id", "name", "weight")))
    Path(spec.source, f"{SECRET}.csv").write_text(TABLE)
    return spec


def file_of(spec: PrepareSpec) -> Path:
    return next(Path(spec.source).iterdir())


def test_columns_become_one_vector(spec: PrepareSpec) -> None:
    info = prepare(spec)
    samples, labels = arrays_of(info)
    assert samples.tolist() == [[63, 150.5], [37, 187], [41, 172]]
    assert (samples.dtype, labels.dtype) == (np.float32, np.int32)
    assert (labels.tolist(), info.max_label) == ([1, 0, 1], 1)
    assert prepare(replace(spec, source=str(file_of(spec)))).num_samples == 3


def test_columns_become_the_inputs_that_are_named_after_them(spec: PrepareSpec) -> None:
    table = replace(spec.table or TableSchema(()), dropped=())
    info = prepare(replace(spec, table=table, inputs={"pulse": (1,), "age": ()}))
    assert info.inputs == {"pulse": ("float32", (1,)), "age": ("float32", ())}
    assert arrays_of(info)[0]["age"].tolist() == [63, 37, 41]


def test_labels_of_several_columns_and_weights(spec: PrepareSpec) -> None:
    table = TableSchema(("pulse", "target"), "weight", ("id", "name"))
    info = prepare(replace(spec, table=table, outputs=("target", "pulse")))
    assert info.labels == {
        "pulse": ("float32", ()),
        "target": ("int32", ()),
        "sample_weight": ("float32", ()),
    }
    assert arrays_of(info)[1]["sample_weight"].tolist() == [0.5, 2, 1]
    info = prepare(replace(spec, table=table))
    assert info.labels == {"label": ("float32", (2,)), "sample_weight": ("float32", ())}
    assert arrays_of(info)[1]["label"][0].tolist() == [150.5, 1]


def test_folder_of_tables_is_read_in_order_of_the_names(spec: PrepareSpec) -> None:
    (Path(spec.source) / "later").mkdir()
    (Path(spec.source) / "later" / "b.CSV").write_text("\ufeff" + TABLE.splitlines()[0] + "\n\n4,1,2,x,7,1\n")
    info = prepare(spec)
    assert arrays_of(info)[1].tolist() == [7, 1, 0, 1]


@pytest.mark.parametrize(
    ("table", "text", "message", "remedy"),
    [
        (None, TABLE, "the job does not describe them", "data.csv"),
        (TableSchema(("target",)), TABLE, "text, or numbers that are not finite in column name", "drop"),
        (TableSchema(("a",)), "a,b\n1,\n", "empty cells in column b", "drop"),
        (TableSchema(("a",)), "a,b\n1,nan\n", "not finite in column b", "drop"),
        (TableSchema(("a",)), "a,b\n1,2024_01\n", "text, .* in column b", "drop"),
        (TableSchema(("goal", "a")), "a,b\n1,2\n", "has no column goal, but a, b", "data.csv"),
        (TableSchema(("a",)), "a,b\n1,2\n1,x\n", "text, .* in column b, line 3$", "drop"),
        (TableSchema(("a",)), "a,b\n1,2\n1,2,3\n", "more cells than the header, line 3$", "commas"),
        (TableSchema(("a",)), "5.1,-3,1e4\n1,2,3\n", "a first line of numbers", "a name for each column"),
        (TableSchema(("a",)), "a,b,b\n1,2,3\n", "a column twice", "same header"),
        (TableSchema(("a",)), "a\n1\n", "no columns but labels", "data.csv"),
        (TableSchema(("a",)), "", "is empty", "add samples"),
        (TableSchema(("a",)), ",a,b\n0,1,2\n", "a column without a name", 'drop: [""]'),
    ],
)
def test_anything_else_is_refused_with_a_remedy(
    spec: PrepareSpec, table: TableSchema | None, text: str, message: str, remedy: str
) -> None:
    file_of(spec).write_text(text)
    with pytest.raises(WorkerError, match=message) as raised:
        prepare(replace(spec, table=table))
    assert remedy in raised.value.remedy
    assert raised.value.exit_code == 2
    assert not any(secret in raised.value.message for secret in (SECRET, "ann", "150.5"))


def test_file_and_line_are_named_unless_they_are_private(spec: PrepareSpec) -> None:
    for name, text in {"a.csv": "x,y\n1,2\n", "b.csv": "x,y\n1,2\n3,\n", "c.csv": "x,z\n1,2\n"}.items():
        Path(spec.source, name).write_text(text)
    Path(spec.source, f"{SECRET}.csv").unlink()
    spec = replace(spec, table=TableSchema(("y",)))
    for one, end in ((spec, ": a.csv and c.csv$"), (replace(spec, is_private=True), "a column twice$")):
        refusal(one, f"different columns, .*{end}")
    Path(spec.source, "c.csv").unlink()
    for one, end in ((spec, "line 3 of b.csv$"), (replace(spec, is_private=True), "line 3$")):
        refusal(one, f"empty cells in column y, {end}")
    Path(spec.source, "b.csv").write_text("x,y\nnan,2\n")
    assert np.isnan(arrays_of(prepare(replace(spec, allows_nan=True)))[0][1, 0])


def test_columns_that_do_not_exist_are_named_and_those_of_private_tables_not(spec: PrepareSpec) -> None:
    refusal(replace(spec, inputs={"age": (1,), "height": (1,)}), "no column height for the model's inputs")
    refusal(replace(spec, table=TableSchema(("goal",)), is_private=True), "has no column goal$")


def test_columns_have_the_order_and_the_names_of_those_of_the_public_data(spec: PrepareSpec) -> None:
    public = prepare(spec)
    assert public.columns == ("age", "pulse")
    file_of(spec).write_text("pulse,age,target\n150.5,63,1\n")
    other = replace(
        spec, store=f"{spec.store}-2", table=TableSchema(("target",)), columns=public.columns, is_private=True
    )
    info = prepare(other)
    assert arrays_of(info)[0].tolist() == [[63, 150.5]]
    assert info.columns == ()
    file_of(spec).write_text("pulse,age,height,target\n150.5,63,1.7,1\n")
    other = replace(other, store=f"{spec.store}-3")
    assert "remove them" in refusal(other, "does not have$")
    refusal(replace(other, is_private=False), "does not have: height$")


def test_whole_numbers_are_values_where_the_loss_takes_values(spec: PrepareSpec) -> None:
    info = prepare(replace(spec, is_regression=True))
    assert (info.label_dtype, arrays_of(info)[1].tolist()) == ("float32", [1, 0, 1])
