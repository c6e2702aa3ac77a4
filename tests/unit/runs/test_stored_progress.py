"""The quick way to read stored progress agrees with the general one, line by line."""

import json
from pathlib import Path

import pytest

from csdctl.runs.stored_progress import SpentReader, parse_progress
from csdctl.worker.protocol.events import Progress, check_event, event_from_line

RECORDED = Path(__file__).parents[1] / "reporting" / "recorded" / "events.jsonl"
NODES = ("host", "csd0", "csd1", "csd2")
LINES = RECORDED.read_text().splitlines(keepends=True)
OF_MACHINE = ',\\"memory_bytes\\":612368384,\\"temperature_c\\":51.5}"}'
NEWER = [line.replace('}"}', OF_MACHINE) for line in LINES if '\\"Progress\\"' in line]
NEWER += [line.replace("51.5", "null").replace("612368384", "null") for line in NEWER]
GOOD = next(line for line in LINES if '\\"Progress\\",\\"rank\\":1' in line)


def test_real_log_is_read_the_same_way() -> None:
    quick = [(line, found) for line in (*LINES, *NEWER) if (found := parse_progress(line, NODES)) is not None]
    assert len(quick) > len(NEWER) + len(LINES) / 2
    for line, (time_s, event) in quick:
        content = json.loads(line)
        assert (time_s, event) == (content["time"], event_from_line(content["line"]))
        check_event(event, NODES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("csd0", "csd1"),
        ('rank\\":1', 'rank\\":9'),
        ('rank\\":1', 'rank\\":0'),
        ('epoch\\":1', 'epoch\\":-1'),
        ('steps\\":', 'steps\\":0'),
        ('loss\\":null', 'loss\\":1.0'),
        ('compute_s\\":', 'compute_s\\":NaN'),
        ('compute_s\\":', 'compute_s\\":1e'),
        ("csd0", "csd0\\\\u0000"),
        ('"time": ', '"time": -'),
        ("Progress", "Finished"),
        ("}\n", "} \n"),
    ],
)
def test_any_other_line_is_left_to_the_general_way(old: str, new: str) -> None:
    assert isinstance((parse_progress(GOOD, NODES) or (0, None))[1], Progress)
    assert parse_progress(GOOD.replace(old, new, 1), NODES) is None


def test_every_cut_off_line_is_left_to_the_general_way() -> None:
    assert [end for end in range(len(GOOD) - 1) if parse_progress(GOOD[:end], NODES)] == []


def test_times_are_read_from_the_lines_that_are_progress_and_from_no_other() -> None:
    reader = SpentReader(NODES)
    for line in (*LINES, *NEWER, *(GOOD[:end] for end in range(len(GOOD) - 1)), GOOD.replace("csd0", "csd1")):
        quick, spent = parse_progress(line, NODES), reader.parse(line.encode())
        assert (quick is None or quick[1].rank == 0) == (spent is None), line
        if quick and spent:
            time_s, event = quick
            times = event.compute_s, event.wait_s, event.wall_s, event.input_s, event.others_s, event.cpu_s
            assert spent == (time_s, event.rank, event.samples, *times, event.temperature_c)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('metrics\\":{', 'metrics\\":{\\"accuracy\\":0.5,'),
        ('rank\\":0', 'rank\\":1'),
        ('loss\\":', 'loss\\":NaN'),
        ("host", "csd0"),
        ('global_samples\\":', 'global_samples\\":-'),
    ],
)
def test_other_line_of_rank_0_is_left_to_the_general_way(old: str, new: str) -> None:
    good = next(line for line in LINES if '\\"Progress\\",\\"rank\\":0' in line)
    assert parse_progress(good, NODES)
    assert parse_progress(good.replace(old, new, 1), NODES) is None
