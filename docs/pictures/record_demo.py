"""Records `make demo` as an animated picture, demo.svg beside this.

    python docs/pictures/record_demo.py

The demo runs in tmux, which is the terminal; what stands on its screen is read a few times a second, and Rich
reads the colours. The picture is CSS alone: no script, and nothing is loaded. It needs tmux and some minutes.

Considered: termtosvg (no longer maintained), svg-term-cli (Node, and a recording of asciinema), Rich's own
export (one screen, with a font from elsewhere), pyte (a terminal in Python, LGPL; tests need tmux anyway).
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.ansi import AnsiDecoder
from rich.color import ColorTriplet
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, ROWS = 100, 28
DIRECTORY = Path("/tmp/csdctl")
"""Paths in the picture begin with this."""
TARGET = Path(__file__).with_name("demo.svg")
POLL_S = 0.5
MIN_SHOWN_S = 0.3
"""Of one screen."""
SILENCE_S = 1.0
"""A screen on which nothing but numbers changes is shown for this long."""
SPEED = 4
END_S = 8.0
"""The last screen stays."""
CELL_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 18, 12
FONT = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
CONSOLE = Console()
COMMAND = "printf '\\033[1m$ make demo\\033[0m\\n'; exec {python} -m csdctl demo"


@dataclass(frozen=True)
class Frame:
    """A screen, and for how long it is shown."""

    lines: tuple[str, ...]
    """With escape sequences of colours."""
    shown_s: float


def record() -> Iterator[tuple[float, tuple[str, ...]]]:
    """Run the demo; yield seconds and the screen whenever that has changed."""
    DIRECTORY.mkdir()
    with tempfile.TemporaryDirectory() as directory:
        tmux = ["tmux", "-S", f"{directory}/tmux", "-f", "/dev/null"]
        found = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # so that no message has its path
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": found}

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [*tmux, *arguments], env=environment, capture_output=True, text=True, check=True
            )
            return done.stdout

        settings = ["set", "-g", "status", "off", ";", "set", "-g", "remain-on-exit", "on", ";"]
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        shell = ["sh", "-c", COMMAND.format(python=sys.executable)]
        run(*settings, "new-session", "-d", *size, "-c", str(DIRECTORY), *shell)
        try:
            yield from _watch(run)
        finally:
            run("kill-server")
            shutil.rmtree(DIRECTORY)


def _watch(run: Callable[..., str]) -> Iterator[tuple[float, tuple[str, ...]]]:
    before: tuple[str, ...] = ()
    start = time.monotonic()
    while True:
        is_over = run("display-message", "-p", "#{pane_dead}").strip() == "1"
        lines = tuple(line.rstrip() for line in run("capture-pane", "-p", "-e").splitlines())
        if lines != before and not is_over:
            before = lines
            yield time.monotonic() - start, lines
        if is_over:
            return
        time.sleep(POLL_S)


def shorten(screens: Sequence[tuple[float, tuple[str, ...]]]) -> list[Frame]:
    """Return frames: `SPEED` times as fast, and with short silences."""
    changes = []
    for _, same in itertools.groupby(screens, key=lambda screen: _without_numbers(screen[1])):
        alike = list(same)
        changes.append((alike[0][0], alike[-1][1]))
    shown = [
        Frame(lines, min(SILENCE_S, (next_s - begun_s) / SPEED))
        for (begun_s, lines), (next_s, _) in itertools.pairwise(changes)
    ]
    kept: list[Frame] = []
    for frame in shown:
        is_short = bool(kept) and kept[-1].shown_s < MIN_SHOWN_S
        before_s = kept.pop().shown_s if is_short else 0.0
        kept.append(Frame(frame.lines, before_s + frame.shown_s))
    return [*kept, Frame(changes[-1][1], END_S)]


def _without_numbers(lines: Sequence[str]) -> str:
    return re.sub(r"[\d.,:]+|\x1b\[[\d;]*m|[━╺╸]+", "", "\n".join(lines))


def draw(frames: Sequence[Frame]) -> str:
    """Return the animation as SVG."""
    width, height = round(COLUMNS * CELL_WIDTH + 2 * MARGIN), ROWS * LINE_HEIGHT + 2 * MARGIN
    known: dict[str, int] = {}
    strip = []
    for number, frame in enumerate(frames):
        drawn = map(_draw_line, AnsiDecoder().decode("\n".join(frame.lines)))  # colours last beyond a line
        uses = [
            f'<use href="#l{known.setdefault(line, len(known))}" y="{(row + 1) * LINE_HEIGHT - 4}"/>'
            for row, line in enumerate(drawn)
            if line
        ]
        strip.append(f'<g transform="translate({number * width})">{"".join(uses)}</g>')
    total_s = sum(frame.shown_s for frame in frames)
    begins = itertools.accumulate((frame.shown_s for frame in frames[:-1]), initial=0.0)
    steps = [
        f"{100 * begin_s / total_s:.3f}%{{transform:translate({-number * width}px)}}"
        for number, begin_s in enumerate(begins)
    ]
    lines = [f'<g id="l{number}">{line}</g>' for line, number in known.items()]
    last = f".film{{animation:none;transform:translate({-(len(frames) - 1) * width}px)}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="title">',
            '<title id="title">make demo in a terminal: an emulated fleet is started, discovered, given '
            "data, tuned and trained, with a live view of every node, and the report is printed.</title>",
            f"<style>svg{{font:14px {FONT};fill:{_hex(SVG_EXPORT_THEME.foreground_color)}}}"
            "text{white-space:pre}.b{font-weight:bold}.d{opacity:.6}"
            f".film{{animation:film {total_s:.1f}s infinite step-end}}",
            f"@keyframes film{{{''.join(steps)}}}",
            f"@media (prefers-reduced-motion:reduce){{{last}}}</style>",
            f'<rect width="{width}" height="{height}" rx="8" '
            f'fill="{_hex(SVG_EXPORT_THEME.background_color)}"/>',
            "<defs>",
            *lines,
            "</defs>",
            f'<svg x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" height="{height - 2 * MARGIN}">',
            '<g class="film">',
            *strip,
            "</g></svg></svg>",
            "",
        ]
    )


def _draw_line(text: Text) -> str:
    """Return a line of the screen as text elements, one for each style."""
    styles = [text.get_style_at_offset(CONSOLE, offset) for offset in range(len(text.plain))]
    column, parts = 0, []
    for style, group in itertools.groupby(range(len(text.plain)), key=lambda offset: str(styles[offset])):
        offsets = list(group)
        plain = text.plain[offsets[0] : offsets[-1] + 1]
        if plain.strip():
            parts.append(_draw_text(plain, column, Style.parse(style)))
        column += len(plain)
    return "".join(parts)


def _draw_text(plain: str, column: int, style: Style) -> str:
    spaces = len(plain) - len(plain.lstrip())
    plain = plain.strip()
    x, length = (column + spaces) * CELL_WIDTH, len(plain) * CELL_WIDTH
    look = [f'fill="{_hex(style.color.get_truecolor(SVG_EXPORT_THEME))}"'] if style.color else []
    if names := " ".join(name for name, is_on in (("b", style.bold), ("d", style.dim)) if is_on):
        look.append(f'class="{names}"')
    attributes = " ".join([f'x="{x:g}" textLength="{length:g}"', *look])
    return f"<text {attributes}>{escape(plain)}</text>"


def _hex(color: ColorTriplet) -> str:
    return color.hex


if __name__ == "__main__":
    frames = shorten(list(record()))
    TARGET.write_text(draw(frames))
    print(f"{TARGET}: {len(frames)} screens, {TARGET.stat().st_size:,} bytes")
