"""GIFs, cut down to their first frame before a decoder sees them.

A decoder takes memory for all frames of a file at once, and a frame may be larger than the header says.
"""

import struct
from dataclasses import dataclass

_EXTENSION, _IMAGE, _END = 0x21, 0x2C, 0x3B
_GRAPHIC_CONTROL = 0xF9


@dataclass(frozen=True)
class _FirstFrame:
    """Where things stand in a GIF's bytes."""

    end: int
    width: int
    height: int
    palette: int
    """Where the colours of the frame begin."""
    num_colours: int
    control: int
    """Where the graphic control extension of the frame begins; 0 when it has none."""


def frame_size(content: bytes) -> tuple[int, int]:
    """Width and height of what the first frame needs; raises ValueError or IndexError when it is damaged."""
    frame = _find_first_frame(content)
    return frame.width, frame.height


def first_frame(content: bytes) -> bytes:
    """The same GIF with the first frame alone, its transparent parts white; raises as `frame_size` does."""
    frame = _find_first_frame(content)
    changed = bytearray(content[: frame.end])
    if frame.control and changed[frame.control + 3] & 1:
        transparent = changed[frame.control + 6]
        if transparent < frame.num_colours:
            place = frame.palette + 3 * transparent
            changed[place : place + 3] = b"\xff\xff\xff"
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
        raise ValueError("gif without a frame")
    left, top, width, height = struct.unpack_from("<HHHH", content, position + 1)
    own_position, own_palette, own_colours = _skip_palette(content[position + 9], position + 10)
    if own_colours:
        palette, num_colours = own_palette, own_colours
    return _FirstFrame(
        end=_skip_blocks(content, own_position + 1),  # behind the byte with the size of codes
        width=max(screen_width, left + width),
        height=max(screen_height, top + height),
        palette=palette,
        num_colours=num_colours,
        control=control,
    )


def _skip_palette(flags: int, position: int) -> tuple[int, int, int]:
    """Where things go on behind a palette, where it begins, and its number of colours, 0 without one."""
    num_colours = 2 << (flags & 7) if flags & 0x80 else 0
    return position + 3 * num_colours, position, num_colours


def _skip_blocks(content: bytes, position: int) -> int:
    """Where things go on behind a row of blocks, each of which begins with its length."""
    while content[position]:
        position += 1 + content[position]
    return position + 1
