"""`verify`: one step of all ranks, compared with the step that Keras takes, and what the numbers show."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import InputError, RunError, option
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpirun import find_mpirun
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.events import Verified
from csdctl.workflows.data.prepare import prepare_in
from csdctl.workflows.train.plan import build_equal_plan, load_fitting_plan
from csdctl.workflows.train.request import TrainOptions, TrainRequest
from csdctl.workflows.train.resolved import RunContext, resolve_random_run
from csdctl.workflows.train.run import build_spec, run_ranks
from csdctl.workflows.train.strategies import choose_strategy
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import open_workspace

NEAR = 8.0
"""Results that differ by this many spreads are as near as Keras is to itself: a spread is the largest of
a few random draws."""
MIN_SHARPNESS = 100.0
"""One sample's effect over the spread, from which on a difference is judged: ten times the spread is
tolerated then, and one sample is ten times as much."""
NUM_RANGED, MAX_COLUMNS = 64, 1024
"""Random samples are in the range of so many public ones. Tables with more columns have one range for all."""


@dataclass(frozen=True)
class Judgement:
    """The outcome in words, and what to do when it is not that all are equal."""

    is_equal: bool
    text: str
    remedy: str = ""


def judge(verified: Verified, nodes: Sequence[str]) -> Judgement:
    """Return what the numbers of rank 0 show. `nodes`: the machine of every rank."""
    differences, spread, one_sample = verified.differences, verified.spread, verified.one_sample
    if not all(map(math.isfinite, [verified.sum_difference, *differences, spread, one_sample])):
        pairs = zip(nodes, differences, strict=True)
        wrong = [node for node, difference in pairs if not math.isfinite(difference)]
        where = f"on {format_node_names(wrong)} " if wrong else ""
        remedy = "check the initial weights and data.input_range"
        if verified.dtype == "float16":
            remedy = "use mixed_bfloat16 instead of mixed_float16"
        text = f"inconclusive: the gradient of random samples {where}is 0 or not finite in {verified.dtype}"
        return Judgement(False, text, remedy)
    if verified.sum_difference > verified.sum_rounding:
        return Judgement(
            False,
            f"the ranks did not get the sum of their vectors: an element is off by "
            f"{verified.sum_difference:.1e} of its terms, and rounding explains {verified.sum_rounding:.1e}",
            "the sum is at fault: please report it, with `csdctl discover`",
        )
    is_sharp, most = one_sample >= MIN_SHARPNESS * spread, max(differences)
    # As many times above the spread as it is below the effect of one sample.
    tolerance = math.sqrt(spread * one_sample)
    if is_sharp and most > tolerance:
        wrong = [node for node, difference in zip(nodes, differences, strict=True) if difference > tolerance]
        return Judgement(
            False,
            f"{format_node_names(wrong)}: the gradient differs by {most:.1e} from Keras' for the same "
            f"samples; rounding explains {spread:.1e}, one sample makes {one_sample:.1e}",
            "compare software and processor with the host's: `csdctl discover --verbose`; if they are equal, "
            "check that machine's memory, or try another number of threads in the plan",
        )
    # Without sharpness, the differences must be far below the effect of one sample.
    if not (is_sharp or 0 < one_sample >= MIN_SHARPNESS**2 * most):
        cause = (
            f"rounding in {verified.compared_in} moves the gradient by {spread:.1e}, one sample by "
            f"{one_sample:.1e}; {MIN_SHARPNESS:g} times as much is needed"
        )
        return Judgement(
            False,
            f"inconclusive: {cause if one_sample else 'another sample has the same gradient'}",
            "check the initial weights: with these, the gradient of random samples is lost in rounding, or "
            "does not depend on the samples",
        )
    if most <= NEAR * spread:
        return Judgement(True, f"equal: within the rounding of {verified.compared_in}")
    return Judgement(
        True,
        f"equal up to rounding: {most / spread:.0f} times the rounding of {verified.compared_in}; "
        f"one sample makes {one_sample / most:.0f} times as much",
    )


@dataclass(frozen=True)
class Verification:
    """The comparison, and the machine of every rank."""

    nodes: tuple[str, ...]
    result: Verified

    @property
    def verdict(self) -> Judgement:
        """The judgement of the comparison."""
        return judge(self.result, self.nodes)

    def check(self) -> None:
        """Raise RunError if ranks differ from Keras."""
        if not self.verdict.is_equal:
            raise RunError(self.verdict.text, remedy=self.verdict.remedy)


def run_verification(request: TrainRequest, events: EventStream) -> Verification:
    """Prepare what is missing and compare one step of the strategy in `request.options`.

    Raises InputError, RunError or DeadlineError.
    """
    find_mpirun()
    job, plan = request.job, None
    path = request.plan_path or ProjectDirectory(request.directory).plan(job.name)
    if not request.batch_size and (request.plan_path or path.exists()):
        plan = load_fitting_plan(path, job, request.fleet)
    with open_workspace(request.directory, request.fleet, "verify", is_locking=True, say=events.say) as space:
        plan = plan or build_equal_plan(job, space.fleet, space.facts, request.batch_size or 16)
        if len(plan.ranks) < 2:
            names = ", ".join(plan.nodes)
            raise InputError(
                f"the plan has one rank ({names}), which would be compared with itself; expected two or more",
                remedy=f"give all machines a batch size ({option('batch_size')} 16), or another plan "
                f"({option('plan')})",
            )
        prepared = prepare_in(space, job, events)
        events.say(f"starting {len(plan.ranks)} ranks")
        if job.noise:
            events.say("compared without clipping and noise: the samples are random, and none is private")
        return _verify(plan, RunContext(job, prepared, space, events), request.options)


def find_ranges(directory: Path) -> dict[str, list[list[float]]]:
    """Return the smallest and largest value of each column of a table, or of all, by input of prepared data.

    Only the first samples are read. An input may be a class, a year, or a pixel. Raises InputError.
    """
    import numpy as np

    try:
        samples = np.load(directory / "images.npy", mmap_mode="r", allow_pickle=False)[:NUM_RANGED]
    except (OSError, ValueError):
        raise InputError("the public data cannot be read", remedy="run `csdctl prepare`") from None
    ranges = {}
    for name in samples.dtype.names or [""]:
        values = samples[name] if name else samples
        is_table = values.ndim == 2 and values.shape[1] <= MAX_COLUMNS
        columns = values.astype(np.float64).reshape(-1, values.shape[1] if is_table else 1)
        columns = columns[np.isfinite(columns).all(axis=1)]
        if columns.size:
            ranges[name] = np.stack([columns.min(axis=0), columns.max(axis=0)], axis=1).tolist()
    return ranges


def _verify(plan: Plan, context: RunContext, options: TrainOptions) -> Verification:
    strategy = choose_strategy(options, plan)
    run, model = (
        context.space.project.new_run(is_scratch=True),
        strategy.divide(context, is_verification=True),
    )
    form = strategy.element_spec(context.prepared)
    ranges = find_ranges(context.space.project.root / form.path) if form.path else {}
    resolved = resolve_random_run(plan.ranks, context, model, strategy.verification_task, form, ranges=ranges)
    results: list[Verified] = []

    def record(event: object) -> None:
        if isinstance(event, Verified):
            results.append(event)

    spec = build_spec(resolved, run, TrainOptions())
    run_ranks(resolved, spec, run, TrainOptions(), EventStream((record,)))
    shutil.rmtree(run.path, ignore_errors=True)
    if not results:
        raise RunError("the ranks ended without a comparison")
    return Verification(tuple(plan.nodes), results[0])
