"""What stored rows depend on: with any of it changed they are computed anew, else they are found."""

from dataclasses import replace
from typing import Any

import pytest

from csdctl.worker.ingest import extract
from csdctl.worker.ingest.extract import fingerprint_of, of_sources
from csdctl.worker.protocol.features import SOFTMAX, VALUES, Augmented, ExtractSpec, ResultRule
from csdctl.worker.protocol.run_spec import DatasetSlice, Prefix, Runtime, UserCode

SOURCE = DatasetSlice("images.npy", "labels.npy", 0, 60, 7, "a" * 64, "b" * 64)
PREFIX = Prefix("model.json", "model.npz", (0.0, 1.0), "float32", UserCode("code.zip", ("mine",)))
VIEWS = Augmented("/somewhere/functions.py:scale", 5, 3)
SPEC = ExtractSpec(SOURCE, "store", PREFIX, Runtime(), augmented=VIEWS)
LITE = replace(SPEC, prefix=replace(PREFIX, lite="model.tflite"))
RESULTS = replace(SPEC, augmented=None, results=(ResultRule("", SOFTMAX),))

DEPENDS = {
    "samples": replace(SPEC, source=replace(SOURCE, images_sha256="c" * 64)),
    "labels": replace(SPEC, source=replace(SOURCE, labels_sha256="c" * 64)),
    "first row": replace(SPEC, source=replace(SOURCE, start=1)),
    "last row": replace(SPEC, source=replace(SOURCE, stop=59)),
    "permutation": replace(SPEC, source=replace(SOURCE, permutation_seed=8)),
    "architecture": replace(SPEC, prefix=replace(PREFIX, architecture="other.json")),
    "weights": replace(SPEC, prefix=replace(PREFIX, weights="other.npz")),
    "code": replace(SPEC, prefix=replace(PREFIX, code=UserCode("other.zip", ("mine",)))),
    "range": replace(SPEC, prefix=replace(PREFIX, input_range=(-1.0, 1.0))),
    "precision": replace(SPEC, prefix=replace(PREFIX, precision="float16")),
    "no views": replace(SPEC, augmented=None),
    "function": replace(SPEC, augmented=replace(VIEWS, augment="/somewhere/functions.py:keep")),
    "file of the function": replace(SPEC, augmented=replace(VIEWS, augment="/somewhere/other.py:scale")),
    "seed of views": replace(SPEC, augmented=replace(VIEWS, seed=6)),
    "number of views": replace(SPEC, augmented=replace(VIEWS, num_views=4)),
    "LiteRT": LITE,
    "LiteRT model": replace(SPEC, prefix=replace(PREFIX, lite="other.tflite")),
    "results": RESULTS,
    "layer": replace(RESULTS, layer="hidden"),
    "kind of result": replace(RESULTS, results=(ResultRule("", VALUES),)),
    "logits": replace(RESULTS, results=(ResultRule("", SOFTMAX, from_logits=True),)),
}


def test_rows_are_found_by_all_that_they_depend_on() -> None:
    found = {name: fingerprint_of(spec) for name, spec in {"itself": SPEC, **DEPENDS}.items()}
    assert len(set(found.values())) == len(found)


def test_rows_are_found_wherever_files_are() -> None:
    for same in (
        replace(SPEC, source=replace(SOURCE, images="elsewhere/images.npy", labels="elsewhere/labels.npy")),
        replace(SPEC, store="elsewhere", runtime=Runtime(8)),
        replace(SPEC, prefix=replace(PREFIX, architecture="/elsewhere/model.json")),
        replace(SPEC, augmented=replace(VIEWS, augment="/elsewhere/functions.py:scale")),
        replace(SPEC, others=(SOURCE,), num_checked=64, num_plain=1),
    ):
        assert fingerprint_of(same) == fingerprint_of(SPEC)


@pytest.mark.parametrize(
    ("spec", "packages"), [(SPEC, {"tensorflow", "keras"}), (LITE, {"ai-edge-litert"})], ids=["keras", "lite"]
)
def test_rows_of_another_version_of_the_engine_are_computed_anew(
    spec: ExtractSpec, packages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for updated in ("", *packages):
        versions = dict.fromkeys(packages, "1.0") | {updated: "2.0"}
        monkeypatch.setattr(extract, "version", lambda name, versions=versions: versions[name])
        found.add(fingerprint_of(spec))
    assert len(found) == 1 + len(packages)


def test_only_training_samples_have_views() -> None:
    others: Any = tuple(replace(SOURCE, start=start) for start in (1, 2))
    found = of_sources(replace(SPEC, others=others, num_plain=1))
    assert [one.source.start for one in found] == [0, 1, 2]
    assert [one.augmented for one in found] == [VIEWS, VIEWS, None]
