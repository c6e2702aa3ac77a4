"""Program of joined_ranks.py: a rank whose steps wait for the test.

    joined_ranks_program.py SPEC RANK

What it prints besides events is JSON. Before each step, rank 0 waits until the file `steps` allows so many.
A rank with a file `hold-RANK` stops in the step that the file names, or in a sum of a check.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import CHECK, RunSpec
from csdctl.worker.tasks.session import TASKS, RankSession

HUB_COMMAND = [sys.executable, "-m", "csdctl.worker", "hub", "--descriptor"]
POLL_S = 0.02


def say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")  # at once, between events of other threads


def hold(rank: int, *position: int) -> None:
    """Stop, and say so, if the test wants this rank to stop here."""
    path = Path(f"hold-{rank}")
    if path.exists() and path.read_text() == repr(position):
        say(held=rank)
        time.sleep(1e6)


def make_train() -> type:
    from csdctl.worker.tasks.train import Train

    class CountedTrain(Train):
        """Says which samples it reads: a sample has its number as its value."""

        def open_reader(self) -> Any:
            reader: Any = super().open_reader()
            read = reader.read

            def read_and_say(share: Any, reassigned: Any = None) -> Any:
                samples, labels = read(share, reassigned)
                position = self.progress.position
                say(read=samples.reshape(-1).astype(int).tolist(), epoch=position.epoch, step=position.step)
                hold(self.me.rank, position.epoch, position.step)
                return samples, labels

            reader.read = read_and_say
            return reader

        def _admit(self, communicator: Any) -> None:
            said: list[int] = []
            while self.is_root and self.progress.position.total_steps >= int(Path("steps").read_text()):
                communicator.look()
                if said != (said := sorted(communicator.joining)):
                    say(joining=said)
                time.sleep(POLL_S)
            super()._admit(communicator)

    return CountedTrain


def make_check(*, is_wrong: bool) -> type:
    from csdctl.worker.tasks.check import SumCheck

    class HeldCheck(SumCheck):
        """Stops in the sums, where the test wants it. Rank 1 may add what it should not."""

        def run(self, communicator: Any) -> str:
            add_up = communicator.sum

            def sum_and_hold(vector: Any) -> Any:
                hold(self.me.rank)
                vector += is_wrong and self.me.rank == 1
                return add_up(vector)

            communicator.sum = sum_and_hold
            return super().run(communicator)

    return HeldCheck


def main() -> int:
    spec, rank = from_json(RunSpec, Path(sys.argv[1]).read_text()), int(sys.argv[2])
    is_wrong = spec.task.arguments.pop("is_wrong", False)
    globals()["Task"] = make_check(is_wrong=is_wrong) if spec.task.name == CHECK else make_train()
    TASKS[spec.task.name] = "__main__:Task"
    try:
        RankSession(spec, rank, HUB_COMMAND).run()
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
