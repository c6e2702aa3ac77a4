"""Decoding and fitting of images in every format, from real files."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from csdctl.worker.ingest.sources.images import ImageDecoder, open_image, upright_size
from csdctl.worker.ingest.sources.source import UnusableError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import ImageRule
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


class TestUnusable:
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
