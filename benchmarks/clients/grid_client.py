"""Trials of many batch sizes with one start of TensorFlow.

    python grid_client.py JOB FLEET PLAN VISITS

VISITS is JSON, [[[batch size of each rank], number of steps], …]; prints JSON: the seconds of a step of each
visit. Threads and other settings are those of the plan.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from csdctl.fleet.fleet_file import load_fleet
from csdctl.job.model import load_job
from csdctl.tuning.plan import load_plan
from csdctl.workflows.data.prepare import prepare_job
from csdctl.workflows.train.resolved import RunContext
from csdctl.workflows.tune.tuning_run import TuningRun
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import open_workspace


def main() -> None:
    job, fleet, plan = (
        load_job(Path(sys.argv[1])),
        load_fleet(Path(sys.argv[2])),
        load_plan(Path(sys.argv[3])),
    )
    ranks = [replace(rank, max_batch_size=None) for rank in plan.ranks]
    seconds = []
    with open_workspace(Path.cwd(), fleet, "tune", is_locking=True) as space:
        context = RunContext(job, prepare_job(job, space, lambda line: None), space, EventStream())
        with TuningRun(ranks, context) as run:
            for sizes, num_steps in json.loads(sys.argv[4]):
                sized = [replace(rank, batch_size=size) for rank, size in zip(ranks, sizes, strict=True)]
                seconds.append(run.take_steps(sized, num_steps).step_s)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
