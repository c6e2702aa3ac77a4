"""`csdctl runs watch` in a real terminal, tmux, at three sizes: what stands on its screen."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.tmux import Tmux
from tests.watched_run import RUN_ID, write_run

SIZES = [(80, 24), (120, 40), (200, 50)]


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    screen = Tmux(tmp_path)
    yield screen
    screen.close()


@pytest.mark.parametrize("num_ranks", [4, 37])
def test_screen_is_whole_at_every_size(tmux: Tmux, tmp_path: Path, num_ranks: int) -> None:
    write_run(tmp_path, num_ranks)
    width, height = SIZES[0]
    watch = [sys.executable, "-m", "csdctl", "runs", "watch"]
    size = ["-x", str(width), "-y", str(height)]
    environment = ["-e", f"PYTHONPATH={Path(__file__).parents[3]}"]
    tmux.run("new-session", "-d", *size, "-c", str(tmp_path), *environment, *watch)
    watcher = int(tmux.run("display-message", "-p", "#{pane_pid}"))
    for width, height in SIZES:
        tmux.run("resize-window", "-x", str(width), "-y", str(height))
        is_wide, num_shown = width >= 120, min(num_ranks, height - 9)
        has_more = num_ranks + 8 > height
        lines: list[str] = []

        def is_now_drawn(
            lines: list[str] = lines,
            num_shown: int = num_shown,
            is_wide: bool = is_wide,
            has_more: bool = has_more,
        ) -> bool:
            lines[:] = tmux.screen()
            return is_drawn(lines, num_ranks, num_shown, is_wide=is_wide, has_more=has_more)

        assert eventually(is_now_drawn), "\n".join(lines)
        text = "\n".join(lines)
        assert f"run {RUN_ID} (emulated fleet)" in lines
        assert "epoch 1/4  step 60/100  " in text
        assert "loss 0.0" in text
        assert "for csd2" in text
        assert "(compute): its time per sample grew to 3.00" in text
        rows = lines[next(i for i, line in enumerate(lines) if line.startswith("node")) + 1 :]
        assert rows[0].startswith("host ")
        assert max(map(len, rows)) <= width
        if num_ranks == 37:
            # A line above the view scrolls off when the view grows.
            assert "csd29 is lost" in "\n".join(tmux.screen(with_scrollback=True))
            assert [row.split()[:2] for row in rows[1:3]] == [["csd11", "lost"], ["csd29", "lost"]]
        slowest = next(row for row in rows[1:] if "training" in row)
        assert slowest.startswith("csd2 ")
        assert ("900 ms" in slowest) == is_wide
        assert ("more: csd" in text) == has_more
    assert os.getpriority(os.PRIO_PROCESS, watcher) == 19


def is_drawn(lines: list[str], num_ranks: int, num_rows: int, *, is_wide: bool, has_more: bool) -> bool:
    """Whether the screen has been drawn since its size changed, and all events were read."""
    header = next((number for number, line in enumerate(lines) if line.startswith("node ")), None)
    if header is None or ("compute" in lines[header]) != is_wide:
        return False
    rows = [line for line in lines[header + 1 :] if line]
    last = ["step 60/100", "for csd2", *(["csd11 lost"] if num_ranks == 37 else [])]
    last += ["more: csd"] if has_more else []
    return len(rows) >= num_rows and all(any(words in line for line in lines) for words in last)
