"""A rank without a model, which csdctl starts as it starts every rank: an honest one, or a hostile one.

The file that `--spec` names holds the machines of all ranks, the hostile rank, and the lines that it prints
when all have joined. Honest ranks wait while the hostile rank takes part, and finish without it.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

STEP = {"epoch": 1, "step": 1, "steps": 1, "samples": 8, "compute_s": 0.1, "wait_s": 0.1, "wall_s": 0.2}
END = {**STEP, "weights_hash": "h"}
del END["step"]


class Rank:
    """One rank, from its first line to its last."""

    def __init__(self, directory: Path, spec: dict[str, Any], rank: int) -> None:
        self.directory, self.spec, self.rank = directory, spec, rank
        self.is_hostile = rank == spec["hostile"]

    def say(self, event: str, **fields: Any) -> None:
        content = {"event": event, "rank": self.rank, "node": self.spec["nodes"][self.rank], **fields}
        self.write("@csdctl " + json.dumps(content))

    def write(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        self.say("Ready", num_samples=8)
        if self.is_hostile:
            threading.Thread(target=self.attack_when_it_is_time, daemon=True).start()
        elif self.rank:
            threading.Thread(target=self.finish_without_hostile_rank, daemon=True).start()
        for line in sys.stdin:
            order = json.loads(line)
            if order["order"] == "Ping":
                self.say("Pong", number=order["number"])
            elif order["order"] == "Begin":
                self.report_members(order["ranks"], is_start=True)
                threading.Thread(target=self.finish_without_hostile_rank, daemon=True).start()

    def report_members(self, ranks: list[int], **fields: Any) -> None:
        """Report, from rank 0, who takes part."""
        sizes = {str(rank): 8 for rank in ranks}
        self.say("Joined", epoch=1, step=0, steps_per_epoch=1, total_steps=0, batch_sizes=sizes, **fields)

    def finish_without_hostile_rank(self) -> None:
        self.wait_for("lost")
        hostile = self.spec["hostile"]
        if self.rank == 0:
            honest = [rank for rank in range(len(self.spec["nodes"])) if rank != hostile]
            self.report_members(honest, lost=[[hostile, "its link was lost"]])
        self.finish()

    def finish(self) -> None:
        of_all = {"global_samples": 16, "loss": 1.0, "accuracy": 0.5} if self.rank == 0 else {}
        self.say("Progress", **STEP, **of_all)
        self.say("EpochEnd", **END, **of_all)
        self.say("Finished", epochs=1, steps=1, weights_hash="h", peak_memory_bytes=1)
        os._exit(0)

    def attack_when_it_is_time(self) -> None:
        self.wait_for("training")
        for line in self.spec["lines"]:
            self.write(line)
        while self.spec["forever"]:
            self.write(self.spec["forever"])
        if self.spec["leaves"]:
            os._exit(0)

    def wait_for(self, name: str) -> None:
        while not (self.directory / name).exists():
            time.sleep(0.01)


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
    path = Path(arguments["--spec"])
    Rank(path.parent, json.loads(path.read_text()), int(arguments["--rank"])).run()
