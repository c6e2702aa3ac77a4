"""The live view of a run on terminals of several sizes, with 4 and 37 ranks."""

import time
from collections.abc import Callable

import pytest

from csdctl.terminal.train import TrainingView
from csdctl.terminal.view import TRAINING, RankRow, choose_rows, describe_rest, draw_curve
from csdctl.worker.protocol.events import Joined, LinkLost, NodeLost, Progress, Ready
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from tests.unit.terminal.test_fleet_views import SIZES, Clock, screen, terminal


def make_view(
    num_ranks: int,
    size: tuple[int, int],
    clock: Callable[[], float] = time.monotonic,
    *,
    is_terminal: bool = True,
) -> TrainingView:
    console = terminal(size, is_terminal=is_terminal)
    ranks = tuple(
        RankSpec(rank, name_of(rank), 8 if rank else 64, Runtime(), None, None, 0, 100)
        for rank in range(num_ranks)
    )
    spec = RunSpec("20261123-084636-637095", "", "", Recipe(), ranks, None, None, "")
    return TrainingView(console, spec, 100, emulated=True, clock=clock)


def name_of(rank: int) -> str:
    return f"csd{rank - 1}" if rank else "host"


def train(view: TrainingView, num_ranks: int, slow: int = 3) -> None:
    sizes = {str(rank): 64 if not rank else 8 for rank in range(num_ranks)}
    for rank in range(num_ranks):
        node = name_of(rank)
        view.show(Ready(rank, node, 100, 1.0))
        view.show(Joined(rank, node, 1, 1, 0, 100, 0, sizes, "star", 0.01))
    for step in range(1, 40):
        for rank in range(num_ranks):
            compute_s = 0.9 if rank == slow else 0.4 + rank / 1000
            loss = 2.0 / step if rank == 0 else None
            view.show(
                Progress(
                    rank, name_of(rank), 1, step, 1, 8, compute_s, 1 - compute_s, 1.0, 400, loss, step / 50
                )
            )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_ranks", [4, 37])
def test_view_fits_and_names_the_slowest_first(num_ranks: int, size: tuple[int, int]) -> None:
    view = make_view(num_ranks, size)
    train(view, num_ranks)
    lines = screen(view, size)
    text = "\n".join(lines)
    assert "step 39/100" in text
    assert "loss █" in text
    is_whole = num_ranks + 7 <= size[1]
    assert ("more: csd" in text) == (not is_whole)
    if not is_whole:
        first = next(index for index, line in enumerate(lines) if line.startswith("host"))
        assert lines[first + 1].startswith("csd2 ")
    assert text.count("training") >= min(num_ranks, 10)


def test_view_of_four_servers_sums_each_up_and_shows_the_ranks_that_matter() -> None:
    """4 × 36 ranks at 80 × 24; the whole of storage3 waits for a node that is lost."""
    names = [
        name
        for server in range(4)
        for name in (f"storage{server}", *(f"storage{server}/csd{n}" for n in range(35)))
    ]
    names[0] = "host"
    ranks = tuple(
        RankSpec(rank, name, 8, Runtime(), None, None, 0, 100, server=rank // 36 * 36)
        for rank, name in enumerate(names)
    )
    spec = RunSpec("20261123-084636-637095", "", "", Recipe(), ranks, None, None, "")
    size = (80, 24)
    view = TrainingView(terminal(size), spec, 100, emulated=True)
    sizes = {str(rank): 8 for rank in range(144)}
    for rank, name in enumerate(names):
        view.show(Joined(rank, name, 1, 1, 0, 100, 0, sizes, "star", 0.01))
        compute_s = 0.9 if name == "storage2/csd7" else 0.5
        view.show(Progress(rank, name, 1, 1, 1, 8, compute_s, 1 - compute_s, 1.0, 1152))
    view.show(NodeLost(120, names[120], "does not answer"))
    lines = screen(view, size)
    assert "host: 36 of 36 ranks training, 288 samples/s" in lines
    assert "storage3: 35 of 36 ranks training, 280 samples/s" in lines
    first = next(index for index, line in enumerate(lines) if line.startswith("node"))
    shown = [line.split()[0] for line in lines[first + 1 :]]
    assert shown[:3] == ["host", "storage3/csd11", "storage2/csd7"]


def test_more_sick_ranks_than_rows_are_named_by_state() -> None:
    ranks = [RankRow("host", TRAINING)]
    ranks += [RankRow(name_of(rank), "lost" if rank > 10 else TRAINING) for rank in range(1, 37)]
    shown, rest = choose_rows(ranks, 10)
    assert [row.node for row in shown] == ["host", *(f"csd{number}" for number in range(10, 18))]
    assert describe_rest(rest) == "28 more: csd[18-35] lost; csd[0-9] training"


@pytest.mark.parametrize(
    ("values", "curve"), [([1.0], "▁"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"), ([3.0] * 4, "▁▁▁▁")]
)
def test_curve(values: list[float], curve: str) -> None:
    assert draw_curve(values, 8) == curve
    assert len(draw_curve(values * 100, 8)) <= 8


def train_held_back(view: TrainingView, slow: int, clock: Clock, temperature_c: float | None = None) -> None:
    """Show 20 s of even steps, then 40 s in which the others wait for `slow`."""
    for second in range(60):
        clock.now += 1.0
        for rank in range(4):
            is_slow = rank == slow
            compute_s = 0.9 if is_slow and second >= 20 else 0.3
            samples = 8 if second < 20 or not is_slow else 6
            wait_s = (0.9 if second >= 20 else 0.3) - compute_s + 0.02
            view.show(
                Progress(
                    rank,
                    name_of(rank),
                    1,
                    second + 1,
                    1,
                    samples,
                    compute_s,
                    wait_s,
                    1.0,
                    input_s=0.0,
                    others_s=wait_s - 0.02,
                    memory_bytes=1 << 30,
                    temperature_c=temperature_c if is_slow else None,
                )
            )


@pytest.mark.parametrize(("temperature_c", "cause"), [(None, "compute"), (91.0, "heat")])
def test_view_says_who_holds_the_others_back_since_when_and_why(
    temperature_c: float | None, cause: str
) -> None:
    for size in SIZES:
        clock = Clock()
        view = make_view(4, size, clock)
        train_held_back(view, 2, clock, temperature_c)
        lines = screen(view, size)
        text = " ".join(line.strip() for line in lines)
        assert f"csd1 has held the others back for 40 s ({cause}): its time per sample grew to 4.00" in text
        assert ("at up to 91 °C" in text) == (cause == "heat")
        assert ("1.0 GiB" in text) == (size[0] >= 120)
        assert ("°C" in next(line for line in lines if line.startswith("node"))) == (
            cause == "heat" and size[0] >= 120
        )


def test_long_silence_shows_how_long_and_who_stands_still() -> None:
    clock = Clock()
    view = make_view(4, (80, 24), clock)
    train(view, 4)
    clock.now += 9
    assert screen(view, (80, 24))[1].startswith("epoch 1/1")
    clock.now += 16
    assert screen(view, (80, 24))[1].startswith("no step for 25 s  epoch 1/1  step 39/100")
    view.show(LinkLost(2, "csd1", 1, 1, 39))
    lines = screen(view, (80, 24))
    assert lines[1].startswith("no step for 25 s (csd1)")
    assert next(line for line in lines if line.startswith("csd1 ")).split() == [
        *("csd1", "waiting", "for", "others", "8", "–"),
    ]
