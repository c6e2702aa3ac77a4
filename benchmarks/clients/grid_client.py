"""One trial with changing batch sizes: the speed of many plans with one start of TensorFlow.

    python grid_client.py JOB PLAN VISITS

VISITS is JSON, [[[batch size of each rank], number of steps], …]; prints JSON: for each visit the seconds of
its steps. The ranks, links and sums are those of csdctl's trials. Only the worker that is sent differs: it
generates random samples as the visits require, whatever the plan's batch sizes, and on rank 0 records when
each step begins.
"""

import io
import json
import sys
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from csdctl.fleet.fleet_file import load_fleet
from csdctl.job.model import load_job
from csdctl.shipping.store import pack_worker, store_bytes
from csdctl.transport.meter import TrafficClass
from csdctl.tuning.plan import load_plan
from csdctl.workflows.data.prepare import prepare_job
from csdctl.workflows.train.resolved import RunContext
from csdctl.workflows.tune.tuning_run import run_trial
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import open_workspace

SYNTHETIC = "csdctl/worker/data/prepared.py"
VISITING = """

import time


class VisitingReader(SyntheticReader):
    def __init__(self, element_spec, rank):
        super().__init__(element_spec, rank)
        self._is_root = rank == 0
        self._sizes = [sizes[rank] for sizes, num_steps in {visits} for _ in range(num_steps)]
        self._step = 0
        self.first(max(self._sizes))

    def read(self, share, reassigned=None):
        if self._is_root:
            with open({times!r}, "a") as file:
                print(time.perf_counter(), file=file)
        self._step += 1
        return self.first(self._sizes[self._step - 1])


SyntheticReader = VisitingReader
"""


def pack_visiting_worker(visits: list[tuple[list[int], int]], times: Path) -> bytes:
    """Return csdctl's worker with another reader of random samples."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pack_worker())) as source, zipfile.ZipFile(packed, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename == SYNTHETIC:
                content += VISITING.format(visits=visits, times=str(times)).encode()
            target.writestr(entry, content)
    return packed.getvalue()


def main() -> None:
    job, plan, visits = load_job(Path(sys.argv[1])), load_plan(Path(sys.argv[2])), json.loads(sys.argv[3])
    counts = [num_steps for _, num_steps in visits]
    times = Path("grid_times.txt").absolute()
    times.unlink(missing_ok=True)
    # A step ends when the next step begins: add a step after the last.
    num_steps = sum(counts) + 1
    packed = pack_visiting_worker([*visits, (visits[-1][0], 1)], times)
    with open_workspace(Path.cwd(), load_fleet(Path("fleet.yaml")), "tune", is_locking=True) as space:
        prepared = prepare_job(job, space, lambda line: None)
        worker = store_bytes(packed, ".pyz", space.project.root, TrafficClass.CODE)
        context = RunContext(job, replace(prepared, worker=worker), space, EventStream())
        run_trial(plan.ranks, context, num_steps)
    seconds = [after - before for before, after in pairwise(map(float, times.read_text().split()))]
    print(json.dumps([[seconds.pop(0) for _ in range(count)] for count in counts]))


if __name__ == "__main__":
    main()
