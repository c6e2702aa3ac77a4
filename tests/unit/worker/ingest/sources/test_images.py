"""Images in every format, from real files; class folders: names, unusable files, links."""

import io
import os
import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.ingest.sources.images import ImageDecoder, open_image, upright_size
from csdctl.worker.ingest.sources.source import UnusableError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import SKIPPED, ImageRule, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from tests.unit.worker.ingest.prepared_data import SECRET, arrays_of, refusal, spec_below
from tests.unit.worker.ingest.sources.encoded_images import (
    CMYK_RED_JPEG,
    PALETTE,
    bmp,
    colours,
    flat,
    gif,
    huge_png,
    jpeg,
    png,
)

INDICES = np.array([[0, 1, 2], [3, 2, 1]])
FROM_PALETTE = np.array(PALETTE, np.uint8)[INDICES]
WHITE = (255, 255, 255)


def decode(content: bytes, *shape: int, fit: str = "stretch", max_pixels: int = 10_000) -> np.ndarray:
    return ImageDecoder(ImageRule(shape, fit, max_pixels)).decode(content)


def reason(content: bytes, max_pixels: int = 10_000) -> str:
    with pytest.raises(UnusableError) as raised:
        decode(content, 4, 4, 3, max_pixels=max_pixels)
    return str(raised.value)


class TestFormats:
    def test_image_of_the_right_shape_is_unchanged(self) -> None:
        image = colours(5, 7)
        with_a_fourth_byte = np.pad(image, ((0, 0), (0, 0), (0, 1)))
        for content in (png(image), bmp(image), bmp(with_a_fourth_byte)):
            assert np.array_equal(decode(content, 5, 7, 3), image)

    def test_cmyk_is_converted_to_rgb(self) -> None:
        red = decode(CMYK_RED_JPEG, 8, 8, 3)[4, 4].tolist()
        assert red[0] > 240
        assert max(red[1:]) < 15

    def test_grayscale_and_rgb_are_converted_to_each_other(self) -> None:
        grey = colours(3, 3, 1)
        assert np.array_equal(decode(png(grey), 3, 3, 3), np.repeat(grey, 3, axis=2))
        assert decode(png(flat(3, 3, 200, 100, 50)), 3, 3, 1)[0, 0, 0] == round(
            0.299 * 200 + 0.587 * 100 + 0.114 * 50
        )

    def test_upper_8_of_16_bits_are_used(self) -> None:
        image = np.array([[0x12FF, 0x8000, 0xFFFF], [0, 0x0100, 0x00FF]], np.uint16)
        assert decode(png(image), 2, 3, 1)[..., 0].tolist() == [[0x12, 0x80, 0xFF], [0, 1, 0]]

    def test_palette_is_resolved(self) -> None:
        assert np.array_equal(decode(png(INDICES), 2, 3, 3), FROM_PALETTE)
        assert np.array_equal(decode(bmp(INDICES), 2, 3, 3), FROM_PALETTE)
        animation = gif(INDICES, INDICES[::-1])
        assert np.array_equal(decode(animation, 2, 3, 3), FROM_PALETTE)  # its first frame

    def test_transparent_pixels_become_white(self) -> None:
        expected = FROM_PALETTE.copy()
        expected[INDICES == 2] = WHITE
        assert np.array_equal(decode(png(INDICES, transparency=2), 2, 3, 3), expected)
        assert np.array_equal(decode(gif(INDICES, transparency=2), 2, 3, 3), expected)
        half = decode(png(flat(2, 2, 200, 0, 100, 128)), 2, 2, 3)[0, 0]
        assert half.tolist() == [round((c * 128 + 255 * 127) / 255) for c in (200, 0, 100)]
        assert decode(png(flat(2, 2, 10, 0)), 2, 2, 1).max() == 255

    @pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint8), (3, np.uint8), (1, np.uint16)])
    def test_pixels_of_a_colour_key_become_white(self, channels: int, dtype: type) -> None:
        """Not those whose upper bits alone are equal."""
        image = colours(4, 5, channels).astype(dtype) * (257 if dtype == np.uint16 else 1)
        image[1, 2] = image[3, 4]
        image[0, 0] = image[3, 4] ^ 1
        key = tuple(image[3, 4].tolist()) if channels == 3 else int(image[3, 4, 0])
        plain = decode(png(image), 4, 5, channels)
        keyed = decode(png(image, transparency=key), 4, 5, channels)
        assert (keyed[1, 2] == 255).all()
        assert (keyed[3, 4] == 255).all()
        is_other = np.ones((4, 5), bool)
        is_other[1, 2] = is_other[3, 4] = False
        assert np.array_equal(keyed[is_other], plain[is_other])

    @pytest.mark.parametrize("orientation", range(10))
    def test_photo_is_turned_upright(self, orientation: int) -> None:
        photo = Image.fromarray(np.kron(colours(4, 6), np.ones((16, 16, 1), np.uint8)).astype(np.uint8))
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = io.BytesIO()
        photo.save(content, "JPEG", quality=100, subsampling=0, exif=exif)
        upright = np.asarray(ImageOps.exif_transpose(Image.open(content)))
        assert np.array_equal(decode(content.getvalue(), *upright.shape), upright)
        assert upright_size(open_image(content.getvalue())) == upright.shape[:2]

    def test_damaged_exif_data_does_not_matter(self) -> None:
        content = io.BytesIO()
        Image.fromarray(flat(8, 8, 9, 9, 9)).save(content, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
        assert np.unique(decode(content.getvalue(), 8, 8, 3)).tolist() == [9]

    @pytest.mark.parametrize("chunk", [(b"zTXt", b"x\0\0" + zlib.compress(bytes(2 << 20))), (b"gAMA", b"1")])
    def test_long_text_and_damaged_chunks_beside_the_pixels_do_not_matter(
        self, chunk: tuple[bytes, bytes]
    ) -> None:
        name, data = chunk
        inserted = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        content = png(INDICES, transparency=2)
        assert np.array_equal(
            decode(content[:33] + inserted + content[33:], 2, 3, 3), decode(content, 2, 3, 3)
        )


class TestUnusableImages:
    def test_huge_image_is_not_decoded(self) -> None:
        assert reason(huge_png(20_990, 29_700), max_pixels=100_000_000) == "too_large"
        assert reason(png(colours(10, 10)), max_pixels=99) == "too_large"
        assert decode(png(colours(10, 10)), 4, 4, 3, max_pixels=100).shape == (4, 4, 3)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            *(png(colours(9, 9))[:-30], jpeg(colours(40, 40))[:-300]),
            *(bmp(colours(9, 9))[:-30], gif(INDICES)[:-8]),
            *(png(colours(2, 2))[:20], huge_png(0, 5), b"BM", b"GIF89a"),
        ],
        ids=lambda content: f"{content[:2]!r}-{len(content)}",
    )
    def test_damaged_image_is_undecodable(self, content: bytes) -> None:
        assert reason(content) == "undecodable"

    @pytest.mark.parametrize("function", ["_load", "_fit"])
    def test_lack_of_memory_is_no_damage(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        def allocate(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(ImageDecoder, function, allocate)
        with pytest.raises(MemoryError):
            decode(png(colours(4, 4)), 4, 4, 3)

    @pytest.mark.parametrize("content", [b"RIFF0000WEBPVP8 ", b"hello"])
    def test_other_file_has_another_format(self, content: bytes) -> None:
        assert reason(content) == "other_format"

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_one_changed_byte_never_crashes_the_process(self, data: st.DataObject) -> None:
        whole = data.draw(
            st.sampled_from([png(colours(6, 6)), jpeg(colours(8, 8)), gif(INDICES), CMYK_RED_JPEG])
        )
        changed = bytearray(whole)
        changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        try:
            fitted = decode(bytes(changed), 4, 4, 3)
        except UnusableError:
            return
        assert fitted.shape == (4, 4, 3)


class TestFit:
    def test_stretch_uses_the_whole_image(self) -> None:
        image = np.concatenate([flat(20, 40, 0, 0, 0), flat(20, 40, 255, 255, 255)])
        fitted = decode(png(image), 4, 4, 3)
        assert fitted[0].max() == 0
        assert fitted[3].min() == 255

    def test_crop_keeps_the_centre(self) -> None:
        sides = flat(10, 10, 0, 0, 0)
        image = np.concatenate([sides, flat(10, 10, 9, 9, 9), sides], axis=1)
        assert np.unique(decode(png(image), 5, 5, 3, fit="crop")).tolist() == [9]

    def test_pad_adds_white_bars(self) -> None:
        fitted = decode(png(flat(10, 40, 0, 0, 0)), 8, 8, 3, fit="pad")
        assert fitted[:3].min() == fitted[5:].min() == 255
        assert fitted[3:5].max() == 0

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 300),
        st.integers(1, 300),
        st.integers(1, 4),
        st.sampled_from([1, 3]),
        st.sampled_from(["stretch", "crop", "pad"]),
    )
    def test_images_of_any_size_get_the_shape_and_stay_white(
        self, height: int, width: int, channels: int, wanted: int, fit: str
    ) -> None:
        fitted = decode(
            png(flat(height, width, *[255] * channels)), 16, 24, wanted, fit=fit, max_pixels=90_000
        )
        assert fitted.shape == (16, 24, wanted)
        assert fitted.dtype == np.uint8
        assert fitted.min() == 255

    def test_large_image_is_close_to_its_local_means(self) -> None:
        image = colours(700, 500)
        fitted = decode(png(image), 5, 5, 3, max_pixels=1_000_000).astype(float)
        blocks = image.reshape(5, 140, 5, 100, 3).mean(axis=(1, 3))
        assert np.abs(fitted - blocks).max() < 6

    @pytest.mark.parametrize("shape", [None, (0, 0, 3), (8, 8), (8, 8, 2), (784,)])
    def test_shape_that_images_cannot_have_is_bad_input(self, shape: tuple[int, ...] | None) -> None:
        with pytest.raises(WorkerError, match="images cannot be converted") as raised:
            ImageDecoder(ImageRule(shape))
        assert (raised.value.exit_code, "data.image.shape" in raised.value.remedy) == (2, True)


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
