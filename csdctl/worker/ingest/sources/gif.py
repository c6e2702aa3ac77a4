"""GIF files, reduced to their first frame before they are decoded.

The decoder allocates memory for all frames of a file at once, and a frame may be larger than the header says.
"""

import struct
from dataclasses import dataclass

_EXTENSION, _IMAGE, _END = 0x21, 0x2C, 0x3B
_GRAPHIC_CONTROL = 0xF9


@dataclass(frozen=True)
class _FirstFrame:
    """Size of the first frame, and byte offsets of its parts."""

    end: int
    width: int
    height: int
    palette: int
    """Offset of the frame's palette."""
    num_colours: int
    control: int
    """Offset of the frame's graphic control extension; 0 if it has none."""


def frame_size(content: bytes) -> tuple[int, int]:
    """Return width and height that the first frame needs; raises ValueError or IndexError if damaged."""
    frame = _find_first_frame(content)
    return frame.width, frame.height


def first_frame(content: bytes) -> bytes:
    """Return the GIF with its first frame only, transparent parts in white; raises as `frame_size` does."""
    frame = _find_first_frame(content)
    changed = bytearray(content[: frame.end])
    if frame.control and changed[frame.control + 3] & 1:
        transparent = changed[frame.control + 6]
        if transparent < frame.num_colours:
            entry = frame.palette + 3 * transparent
            changed[entry : entry + 3] = b"\xff\xff\xff"
        changed[frame.control + 3] &= 0xFE
    changed.append(_END)
    return bytes(changed)


def _find_first_frame(content: bytes) -> _FirstFrame:
    screen_width, screen_height = struct.unpack_from("<HH", content, 6)
    position, palette, num_colours = _skip_palette(content[10], 13)
    control = 0
    while content[position] == _EXTENSION:
        if content[position + 1] == _GRAPHIC_CONTROL:
            control = position
        position = _skip_blocks(content, position + 2)
    if content[position] != _IMAGE:
        raise ValueError("GIF without a frame")
    left, top, width, height = struct.unpack_from("<HHHH", content, position + 1)
    own_position, own_palette, own_colours = _skip_palette(content[position + 9], position + 10)
    if own_colours:
        palette, num_colours = own_palette, own_colours
    return _FirstFrame(
        end=_skip_blocks(content, own_position + 1),  # after the byte with the minimum code size
        width=max(screen_width, left + width),
        height=max(screen_height, top + height),
        palette=palette,
        num_colours=num_colours,
        control=control,
    )


def _skip_palette(flags: int, position: int) -> tuple[int, int, int]:
    """Return the offset after a palette, its own offset, and its number of colours (0 without a palette)."""
    num_colours = 2 << (flags & 7) if flags & 0x80 else 0
    return position + 3 * num_colours, position, num_colours


def _skip_blocks(content: bytes, position: int) -> int:
    """Return the offset after a sequence of sub-blocks, each of which starts with its length."""
    while content[position]:
        position += 1 + content[position]
    return position + 1
