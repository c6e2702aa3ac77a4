"""The live view of a run on terminals of several sizes, and its shards as text."""

import io
from dataclasses import replace

import pytest

from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.run_view import TRAINING, RankRow, TrainingView, choose_rows, describe_hidden
from csdctl.terminal.train import describe_learning_rate, describe_repeats
from csdctl.worker.protocol.events import EpochEnd, Joined, NodeBack, NodeLost, Ready, Warned
from csdctl.worker.protocol.recipe import Recipe
from csdctl.worker.protocol.run_spec import RankSpec, Runtime
from tests.unit.runs.manifests import spec_of, started_of
from tests.watched_run import make_events, name_of

SIZES = [(80, 24), (120, 40), (200, 50)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(size: tuple[int, int], *, is_terminal: bool = True) -> PrintableConsole:
    return PrintableConsole(file=io.StringIO(), force_terminal=is_terminal, width=size[0], height=size[1])


def screen(view: TrainingView, size: tuple[int, int]) -> list[str]:
    plain = PrintableConsole(file=io.StringIO(), width=size[0], height=size[1])
    with plain.capture() as captured:
        plain.print(view._render())
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert len(lines) <= size[1] - 2
    assert max(map(len, lines)) <= size[0]
    return lines


def make_view(num_ranks: int, size: tuple[int, int], clock: Clock) -> TrainingView:
    spec = spec_of(map(name_of, range(num_ranks)))
    return TrainingView(terminal(size), started_of(spec, 100, emulated=True), clock)


def train(view: TrainingView, num_ranks: int, clock: Clock) -> None:
    """Show 20 s of even steps, then 40 s in which the others wait for csd2."""
    for time_s, event in make_events(num_ranks):
        clock.now = time_s
        view.show(event)


@pytest.mark.parametrize(
    ("num_steps", "said"),
    [(72, ""), (71, "; 1 step is repeated"), (48, "; 24 steps are repeated"), (0, "; 72")],
)
def test_resumed_run_says_how_many_steps_are_repeated_since_the_state_was_saved(
    num_steps: int, said: str
) -> None:
    """Those of the run so far, also when it begins again."""
    end = EpochEnd(0, "host", 3, 72, 72, 1.0, 0.0, 1.0, "hash", 72)
    spec, screen = spec_of(), terminal((200, 50))
    view = TrainingView(screen, started_of(spec, 24, past=[end]))
    problem = "checkpoints/step-00000072.npz is damaged: empty"
    for event in (
        Warned(0, "host", problem, "look at the disk"),
        Joined(0, "host", 1 + num_steps // 24, 0, 24, num_steps, {"0": 8}, is_start=True),
    ):
        view.show(event)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert f"warning: host: {problem}" in text
    assert "→ look at the disk" in text
    assert f"global batch 8{said}" in text
    assert ("repeated" in text) == bool(said)


def test_more_sick_ranks_than_rows_are_named_by_state() -> None:
    ranks = [RankRow("host", state=TRAINING)]
    ranks += [RankRow(name_of(rank), state="lost" if rank > 10 else TRAINING) for rank in range(1, 37)]
    drawn, hidden = choose_rows(ranks, 10)
    assert [row.node for row in drawn] == ["host", *(f"csd{number}" for number in range(10, 18))]
    assert describe_hidden(hidden) == "28 more: csd[18-35] lost; csd[0-9] training"


def test_view_says_whom_the_others_wait_for_and_why() -> None:
    for size in SIZES:
        clock = Clock()
        view = make_view(4, size, clock)
        train(view, 4, clock)
        lines = screen(view, size)
        text = " ".join(line.strip() for line in lines)
        assert "for csd2 (compute): its time per sample grew to 3.00" in text


def test_long_silence_shows_how_long_and_who_stands_still() -> None:
    clock = Clock()
    view = make_view(4, (80, 24), clock)
    train(view, 4, clock)
    clock.now += 9
    assert screen(view, (80, 24))[1].startswith("epoch 1/1")
    clock.now += 16
    assert screen(view, (80, 24))[1].startswith("no step for 25 s  epoch 1/1  step 60/100")
    view.show(NodeLost(2, "csd1", "killed"))
    lines = screen(view, (80, 24))
    assert lines[1].startswith("no step for 25 s (csd1)")
    assert next(line for line in lines if line.startswith("csd1 ")).split() == ["csd1", "lost", "8", "–"]


def test_state_of_a_rank_is_what_rank_0_and_csdctl_say_last() -> None:
    view = make_view(4, (80, 24), Clock())

    def states() -> list[str]:
        lines = screen(view, (80, 24))
        states_by_node = dict(line.split()[:2] for line in lines if line.startswith(("host ", "csd")))
        return [states_by_node[name_of(rank)] for rank in range(4)]

    def joined(*ranks: int, is_start: bool = False) -> Joined:
        return Joined(0, "host", 1, 5, 100, 5, {str(rank): 8 for rank in ranks}, is_start)

    for rank in range(3):
        view.show(Ready(rank, name_of(rank), 8))
    assert states() == ["ready", "ready", "ready", "starting"]
    view.show(joined(0, 1, 2, is_start=True))
    assert states() == ["training", "training", "training", "starting"]
    view.show(joined(0, 1, 2, 3))
    assert states() == ["training"] * 4
    view.show(NodeLost(2, "csd1", "killed"))  # before rank 0 knows of it
    view.show(joined(0, 1, 2))
    assert states() == ["training", "training", "lost", "training"]
    view.show(joined(0, 1))
    view.show(joined(0, 1, 2))
    view.show(NodeBack(2, "csd1"))
    assert states() == ["training"] * 4


def test_wait_for_rank_0_is_said_where_it_begins_again() -> None:
    clock, to = Clock(), terminal((200, 50))
    view = TrainingView(to, started_of(spec_of(), 24), clock)
    again = Joined(0, "host", 1, 5, 24, 5, {"0": 8}, is_start=True)
    view.show(replace(again, step=0, total_steps=0))
    view.show(NodeLost(0, "host", "killed"))
    clock.now += 4
    view.show(again)
    clock.now += 60
    view.show(replace(again, batch_sizes={"0": 8, "1": 8}, is_start=False))
    said = [line for line in to.file.getvalue().splitlines() if "continue" in line]  # type: ignore[attr-defined]
    assert [line.partition("; ")[2] for line in said] == ["they waited for 4.0 s", ""]


def rank(number: int, node: str, batch_size: int, private: int, public: int, **more: float) -> RankSpec:
    return RankSpec(number, node, batch_size, Runtime(1), None, None, private, public, **more)  # type: ignore[arg-type]


def test_private_samples_that_are_read_more_than_once_are_lines() -> None:
    ranks = rank(0, "host", 100, 0, 5000), rank(1, "csd0", 10, 500, 0, num_repeated=150, weight=0.7)
    line = "csd0: 350 private samples are read 1.43 times an epoch, each with weight 0.70"
    assert describe_repeats(spec_of(ranks=ranks)) == [line]


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (None, "learning rate 0.0022 (0.001 × 70/32; limit: recipe.max_learning_rate)"),
        (0.001, "learning rate 0.001 (0.001 × 70/32; limit: 0.001)"),
    ],
)
def test_scaled_learning_rate_is_a_line(limit: float | None, line: str) -> None:
    recipe = Recipe(learning_rate=0.001, reference_batch=32, max_learning_rate=limit)
    ranks = (rank(0, "host", 60, 0, 600), rank(1, "csd0", 10, 0, 100))
    assert describe_learning_rate(replace(spec_of(ranks=ranks), recipe=recipe)) == line
