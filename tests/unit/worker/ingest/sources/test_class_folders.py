"""Trees of class folders: matching of class names, unusable files, links."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import SKIPPED, ImageRule, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from tests.unit.worker.ingest.prepared_data import SECRET, arrays_of, refusal, spec_below
from tests.unit.worker.ingest.sources.encoded_images import colours, flat, huge_png, jpeg, png


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    return spec_below(tmp_path, picture=ImageRule((4, 4, 3)), names_classes=True)


def put(root: Path, name: str, content: bytes | None = None) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(colours(9, 9)) if content is None else content)


class TestClasses:
    def test_public_folders_sorted_by_name_define_the_classes(self, root: Path, spec: PrepareSpec) -> None:
        """But hidden ones and lost+found."""
        hidden = ("cat/.thumbnails/a.png", ".git/a.png", "lost+found/a.png", "cat/Thumbs.db", "desktop.ini")
        for name in ("dog/b.png", "cat/a.png", "dog/a.jpg", "ant/a.png", *hidden):
            put(root, name, jpeg(colours(8, 8)) if name.endswith("jpg") else None)
        info = prepare(spec)
        assert (info.class_counts, info.num_skipped) == ({"ant": 1, "cat": 1, "dog": 2}, {})
        assert arrays_of(info)[1].tolist() == [0, 1, 2, 2]
        assert (info.sample_shape, info.dtype, info.label_shape) == ((4, 4, 3), "uint8", ())
        assert info.max_label == 2

    def test_listed_classes_define_labels_and_may_have_no_folder(self, root: Path, spec: PrepareSpec) -> None:
        put(root, "caf\u0065\u0301/a.png")  # another Unicode form of the same name
        put(root, "ant/a.png")
        info = prepare(replace(spec, classes=("dog", "caf\u00e9", "ant"), names_classes=False))
        assert sorted(arrays_of(info)[1].tolist()) == [1, 2]
        assert info.class_counts == {"dog": 0, "caf\u00e9": 1, "ant": 1}
        assert (info.max_label, info.unusable_classes) == (2, ())

    def test_unknown_class_is_named(self, root: Path, spec: PrepareSpec) -> None:
        put(root, f"cat/{SECRET}.png")
        put(root, f"lion/{SECRET}.png")
        assert "data.classes" in refusal(replace(spec, names_classes=False), "")
        refusal(replace(spec, classes=("cat", "dog")), "has class lion, not among the job's 2 classes")
        for number in range(9):
            put(root, f"c{number}/{SECRET}.png")
        refusal(replace(spec, classes=("cat", "lion")), "classes c0, c1, c2, c3, c4 and 4 more")

    @pytest.mark.parametrize("name", [b"a\x1b[31mb", b"\xff\xfe"])
    def test_folder_of_unprintable_name_is_refused(self, root: Path, spec: PrepareSpec, name: bytes) -> None:
        put(root, f"{os.fsdecode(name)}/a.png")
        with pytest.raises(WorkerError) as raised:
            prepare(spec)
        assert raised.value.message.isprintable()


class TestUnusable:
    def test_unusable_files_are_counted_by_reason(self, root: Path, spec: PrepareSpec) -> None:
        for name, content in {
            "cat/a.png": None,
            "cat/b.png": png(colours(9, 9))[:-30],
            "cat/c.png": b"",
            "cat/notes.txt": b"my cat",
            "cat/too large to be read.png": None,
            "dog/huge.png": huge_png(20_990, 29_700),
            "dog/looks.png": jpeg(colours(8, 8))[:-60],
            "readme.txt": b"cats and dogs",
        }.items():
            put(root, name, content)
        os.truncate(root / "cat" / "too large to be read.png", 1 << 40)
        (root / "cat" / "gone.png").symlink_to("nothing.png")
        info, reasons = prepare(spec), ("no_class", "other_format", "too_large", "undecodable", "unreadable")
        assert info.num_skipped == dict(zip(reasons, (1, 1, 2, 3, 1), strict=True))
        assert info.class_counts == {"cat": 1, "dog": 0}
        assert info.unusable_classes == ("dog",)
        lines = Path(info.path, SKIPPED).read_text().splitlines()
        assert sorted(lines) == [
            "no_class readme.txt",
            "other_format cat/notes.txt",
            "too_large cat/too large to be read.png",
            "too_large dog/huge.png",
            *(f"undecodable {name}" for name in ("cat/b.png", "cat/c.png", "dog/looks.png")),
            "unreadable cat/gone.png",
        ]
        assert info.skipped == tuple(line.partition(" ")[2] for line in lines[:5])

    def test_skipped_files_are_named_in_lines_and_private_ones_on_their_node(
        self, root: Path, spec: PrepareSpec
    ) -> None:
        for name in ("a.png", f"{SECRET}.png", "b\nc.png", os.fsdecode(b"\xff.png")):
            put(root, f"cat/{name}", b"" if name > "a.png" else None)
        info = prepare(replace(spec, classes=("cat",), is_private=True))
        assert (info.num_skipped, info.skipped) == ({"undecodable": 3}, ())
        assert SECRET not in to_json(info)
        lines = Path(info.path, SKIPPED).read_text().splitlines()
        names = [r"'cat/b\nc.png'", f"cat/{SECRET}.png", r"'cat/\udcff.png'"]
        assert lines == [f"undecodable {name}" for name in names]

    def test_folders_of_data_sets_are_no_classes_unless_listed(self, root: Path, spec: PrepareSpec) -> None:
        for name in ("Test", "train", "val"):
            put(root, f"{name}/cat/a.png")
        remedy = refusal(spec, "the folders Test, train, val, which are data sets, not classes")
        assert remedy == f"data.public.path: {root}/train; another one as data.validation.path"
        put(root, "bus/a.png")
        assert len(prepare(spec).class_counts) == 4
        shutil.rmtree(root / "bus")
        assert prepare(replace(spec, classes=("Test", "train", "val"))).num_samples == 3

    def test_single_folder_of_folders_is_a_class_if_it_is_listed(self, root: Path, spec: PrepareSpec) -> None:
        """An archive that is unpacked into a folder of its own name has its classes one level deeper."""
        for name in ("pets/README", "pets/cat/a.png", "pets/dog/a.png", "pets/dog/b.png"):
            put(root, name)
        remedy = refusal(spec, "has a single class, pets, whose files are in folders of their own")
        assert f"data.public.path: {root}/pets; else data.classes: [pets]" in remedy
        assert prepare(replace(spec, classes=("pets",))).num_samples == 4

    @pytest.mark.parametrize("content", [None, b"text"])
    def test_no_usable_samples_are_refused(
        self, root: Path, spec: PrepareSpec, content: bytes | None
    ) -> None:
        (root / "cat").mkdir()
        if content:
            put(root, f"cat/{SECRET}", content)
        remedy = refusal(spec, "no usable samples: 1 other format" if content else "no usable samples$")
        assert ("your own function" in remedy) == bool(content)


class TestLinks:
    @pytest.mark.parametrize(
        ("link", "target", "message"),
        [
            (f"cat/{SECRET}.png", f"../../{SECRET}.png", "a link that leads out of it"),
            (f"cat/{SECRET}.png", "../dog/../../outside", "a link that leads out of it"),
            ("cat/b.png", ".hidden", "a link that leads out of it"),
            ("dog", "cat", "a link to a directory"),
        ],
    )
    def test_link_that_leads_out_is_refused(
        self, root: Path, spec: PrepareSpec, link: str, target: str, message: str
    ) -> None:
        put(root, "cat/a.png")
        put(root.parent, "data-old/b.png")
        (root / "cat" / ".hidden").symlink_to(root.parent / "data-old" / "b.png")
        (root / link).symlink_to(target)
        refusal(spec, message)

    def test_link_to_a_file_below_the_root_is_followed(self, root: Path, spec: PrepareSpec) -> None:
        put(root, "cat/a.png", png(flat(4, 4, 7, 7, 7)))
        (root / "dog").mkdir()
        (root / "dog" / "a.png").symlink_to("../cat/a.png")
        info = prepare(spec)
        assert info.class_counts == {"cat": 1, "dog": 1}
        assert np.unique(arrays_of(info)[0]).tolist() == [7]
