"""The live views of `prepare`, `extract` and `predict` on several terminals, with 4 and 37 nodes."""

import io
from typing import Any

import pytest

from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.prepare import SILENT_S, PreparationScreen, PreparingView
from csdctl.terminal.streams import Streams
from csdctl.terminal.view import FleetView
from csdctl.worker.protocol.datasets import PrepareProgress

SIZES = [(80, 24), (120, 40), (200, 50)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def nodes(count: int) -> list[str]:
    return ["host", *(f"csd{number}" for number in range(count - 1))]


def terminal(size: tuple[int, int], *, is_terminal: bool = True) -> PrintableConsole:
    return PrintableConsole(file=io.StringIO(), force_terminal=is_terminal, width=size[0], height=size[1])


def screen(view: FleetView[Any], size: tuple[int, int]) -> list[str]:
    plain = PrintableConsole(file=io.StringIO(), width=size[0], height=size[1])
    with plain.capture() as captured:
        plain.print(view._render())
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert len(lines) <= size[1] - 2
    assert max(map(len, lines)) <= size[0]
    return lines


def extract(count: int, size: tuple[int, int], clock: Clock, slow: str) -> PreparingView:
    """Show machines that have done half, but for a slow one."""
    view = PreparingView(terminal(size), what="computing features", expected=nodes(count), clock=clock)
    for elapsed_s in range(11):
        clock.now = 100.0 + elapsed_s
        for name in nodes(count):
            view.show(name, PrepareProgress((10 if name == slow else 50) * elapsed_s, 1000))
    return view


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [4, 37])
def test_extract_shows_what_is_done_and_the_slowest_first(count: int, size: tuple[int, int]) -> None:
    lines = screen(extract(count, size, Clock(), "csd2"), size)
    assert lines[0] == "computing features"
    done = 500 * (count - 1) + 100
    assert lines[1].startswith(f"{done:,} of {1000 * count:,} samples")
    assert "90.0 s left" in lines[1]  # those of the slowest: 900 at 10/s
    first = next(number for number, line in enumerate(lines) if line.startswith("node"))
    assert lines[first + 1].startswith("csd2 ")
    assert "10%" in lines[first + 1]
    assert ("more: " in "\n".join(lines)) == (count + 6 > size[1])


@pytest.mark.parametrize("size", SIZES)
def test_machine_that_is_silent_is_never_in_a_row_of_others(size: tuple[int, int]) -> None:
    clock = Clock()
    view = extract(37, size, clock, "csd2")
    clock.now += SILENT_S + 5
    for name in nodes(37):
        if name != "csd30":
            view.show(name, PrepareProgress(600, 1000))
    (line,) = [line for line in screen(view, size) if line.startswith("csd30 ")]
    assert "silent for 25 s" in line


def test_samples_that_were_found_do_not_make_a_rate() -> None:
    clock = Clock()
    view = PreparingView(terminal((80, 24)), expected=["host"], clock=clock)
    view.show("host", PrepareProgress(900, 1000))
    clock.now += 10
    view.show("host", PrepareProgress(950, 1000))
    assert "5.0 samples/s  10.0 s left" in screen(view, (80, 24))[1]
    clock.now += 2
    view.show("host", PrepareProgress(970, 1000))  # TensorFlow was loaded before the first ones
    assert "10.0 samples/s  3.0 s left" in screen(view, (80, 24))[1]


def test_quiet_has_no_view_and_no_lines() -> None:
    out = io.StringIO()
    streams = Streams(stdout=out, is_quiet=True)
    with PreparationScreen(streams).preparing("computing features", nodes(2)) as show:
        show("host", PrepareProgress(10, 100))
    assert out.getvalue() == ""
