"""What comes before training, from Python: discover, prepare, tune, verify."""

from csdctl.api.job import Job
from csdctl.api.options import TuneOptions
from csdctl.api.session import FleetOrPath, as_fleet, open_session
from csdctl.errors import RunError
from csdctl.terminal.fleet import DiscoverView, render_fleet
from csdctl.terminal.prepare import PreparationScreen, PreparingView, render_prepared
from csdctl.terminal.tune import TuningScreen, render_plan, render_verified
from csdctl.tuning.plan import Plan
from csdctl.workflows.data.prepare import Prepared, prepare_fleet
from csdctl.workflows.discovery.discover import DiscoverResult
from csdctl.workflows.discovery.discover import discover as discover_machines
from csdctl.workflows.train.options import TrainOptions
from csdctl.workflows.train.train import TrainRequest
from csdctl.workflows.train.verify import Verification, judge, run_verification
from csdctl.workflows.tune.tune import tune_job


def discover(fleet: FleetOrPath = "fleet.yaml") -> DiscoverResult:
    """Collect the hardware and software of all machines, show and save it.

    `.facts` of the result has it by machine, `.failed` the errors of the machines that could not be reached;
    they are not raised.
    """
    chosen = as_fleet(fleet)
    with open_session() as streams:
        with DiscoverView(streams.console, len(chosen.machines)) as view:
            result = discover_machines(chosen, directory=streams.directory, on_done=view.take)
        render_fleet(streams.console, result, verbose=False)
    return result


def prepare(job: Job, fleet: FleetOrPath = "fleet.yaml") -> Prepared:
    """Convert model and data of `job` where they lie, and compare with its hashes what was prepared before.

    `tune`, `train` and `verify` prepare what is missing by themselves. Raises InputError when model and data
    do not fit together.
    """
    loaded, chosen = job.load(), as_fleet(fleet)
    with open_session() as streams:
        with PreparingView(streams.views) as view:
            prepared = prepare_fleet(
                loaded,
                chosen,
                directory=streams.directory,
                say=streams.say,
                on_progress=view.show,
            )
        render_prepared(streams.console, prepared)
    return prepared


def tune(job: Job, fleet: FleetOrPath = "fleet.yaml", options: TuneOptions | None = None) -> Plan:
    """Measure the machines of `fleet`, save the plan with the highest throughput, and return it."""
    loaded, chosen = job.load(), as_fleet(fleet)
    with open_session() as streams:
        screen = TuningScreen(streams)
        saved = tune_job(loaded, chosen, streams.directory, options or TuneOptions(), screen)
        render_plan(streams.console, saved.plan, str(saved.path.relative_to(streams.directory)))
    return saved.plan


def verify(job: Job, fleet: FleetOrPath = "fleet.yaml") -> Verification:
    """Compare the gradient of all ranks with that of one process, and show how far apart they are.

    Raises RunError when they differ by more than rounding explains.
    """
    loaded, chosen = job.load(), as_fleet(fleet)
    with open_session() as streams:
        request = TrainRequest(loaded, chosen, streams.directory, TrainOptions())
        found = run_verification(request, PreparationScreen(streams))
        verdict = judge(found.result, found.nodes)
        render_verified(streams.console, found.result, verdict, found.nodes, emulated=chosen.emulated)
    found.check_features()
    if not verdict.is_equal:
        raise RunError(verdict.text, remedy=verdict.remedy)
    return found
