"""A rank without a model, which csdctl starts as it starts every rank: an honest one, or a hostile one.

The file that `--spec` names holds the machines of all ranks, the hostile rank, and the lines that it prints
when its time has come. Honest ranks wait while the hostile rank is in their group, and finish without it.
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
        self.generation = 0

    def say(self, event: str, **fields: Any) -> None:
        content = {"event": event, "rank": self.rank, "node": self.spec["nodes"][self.rank], **fields}
        self.write("@csdctl " + json.dumps(content))

    def write(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        if self.is_hostile and self.spec["when"] == "start":
            self.attack()
        self.say("Ready", num_samples=8)
        for line in sys.stdin:
            order = json.loads(line)
            if order["order"] == "Ping":
                self.say("Pong", number=order["number"])
            elif order["order"] == "FormGroup":
                self.join(order["generation"], order["ranks"])

    def join(self, generation: int, ranks: list[int]) -> None:
        self.generation = generation
        if not (self.is_hostile and self.spec["when"] == "group"):
            sizes = {str(rank): 8 for rank in ranks}
            self.say("Joined", generation=generation, epoch=1, step=0, steps_per_epoch=1, total_steps=0,
                     batch_sizes=sizes, collective="star", sum_s=0.01)  # fmt: skip
        if self.spec["hostile"] not in ranks:
            self.finish()
        elif self.is_hostile:
            threading.Thread(target=self.attack_while_training, daemon=True).start()
        elif self.rank == 0:
            threading.Thread(target=self.report_a_lost_link, daemon=True).start()

    def finish(self) -> None:
        whole = {"global_samples": 16, "loss": 1.0, "accuracy": 0.5} if self.rank == 0 else {}
        self.say("Progress", **STEP, **whole)
        self.say("EpochEnd", **END, **whole)
        self.say("Finished", epochs=1, steps=1, weights_hash="h", peak_memory_bytes=1)
        os._exit(0)

    def attack_while_training(self) -> None:
        self.wait_for("training" if self.spec["when"] == "training" else "")
        self.attack()

    def attack(self) -> None:
        for line in self.spec["lines"]:
            self.write(line)
        while self.spec["forever"]:
            self.write(self.spec["forever"])
        if self.spec["leaves"]:
            os._exit(0)

    def report_a_lost_link(self) -> None:
        self.wait_for("finished")
        self.say("LinkLost", generation=self.generation, epoch=1, step=0)

    def wait_for(self, name: str) -> None:
        while not (self.directory / name).exists():
            time.sleep(0.01)


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
    path = Path(arguments["--spec"])
    Rank(path.parent, json.loads(path.read_text()), int(arguments["--rank"])).run()
