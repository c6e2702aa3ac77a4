"""`verify`: one step of all ranks, compared with the same step in one process, and what the numbers show."""

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from csdctl.errors import InputError, RunError, option
from csdctl.fleet.names import format_node_names
from csdctl.launch.mpirun import find_mpirun
from csdctl.runs.directory import ProjectDirectory
from csdctl.tuning.plan import Plan
from csdctl.worker.protocol.events import MIN_SHARPNESS, Verified
from csdctl.worker.protocol.features import FLOAT16, FLOAT32, Recomputed
from csdctl.workflows.data.prepare import prepare_in
from csdctl.workflows.train.plan import build_equal_plan, load_fitting_plan
from csdctl.workflows.train.request import TrainOptions, TrainRequest
from csdctl.workflows.train.run import run_ranks
from csdctl.workflows.train.spec import RunContext, build_spec
from csdctl.workflows.train.strategies import choose_strategy
from csdctl.workflows.train.train import resolve_run
from csdctl.workflows.workspace.event_stream import EventStream
from csdctl.workflows.workspace.workspace import open_workspace

NEAR = 8.0
"""Results that differ by so many spreads are as near as one process is to itself: a spread is the largest of
a few random draws."""
FEATURE_TOLERANCE = 1e-5
"""Maximum difference of the features of one sample, computed twice."""


@dataclass(frozen=True)
class Judgement:
    """The outcome in words, and what to do when it is not that all are equal."""

    is_equal: bool
    text: str
    remedy: str = ""


def judge(verified: Verified, nodes: Sequence[str]) -> Judgement:
    """Return what the numbers of rank 0 show. `nodes`: the machine of every rank."""
    # Draws of one rank may miss what rounding does to the gradient of another.
    widest = max(rank.spread for rank in verified.of_ranks)
    wide = [dataclasses.replace(rank, spread=widest) for rank in verified.of_ranks]
    ranks = [wider if wider.is_sharp else rank for wider, rank in zip(wide, verified.of_ranks, strict=True)]
    numbers = [number for rank in ranks for number in (rank.difference, rank.spread, rank.one_sample)]
    if not all(map(math.isfinite, [verified.sum_difference, *numbers])):
        return _judge_not_finite(verified, nodes)
    if verified.sum_difference > verified.sum_rounding:
        return Judgement(
            False,
            f"the ranks did not get the sum of their vectors: an element is off by "
            f"{verified.sum_difference:.1e} of its terms, and rounding explains {verified.sum_rounding:.1e}",
            "the sum is at fault: please report it, with `csdctl discover`",
        )
    if wrong := [at for at, rank in enumerate(ranks) if rank.is_sharp and rank.difference > rank.tolerance]:
        worst = max((verified.of_ranks[at] for at in wrong), key=lambda rank: rank.difference)
        return Judgement(
            False,
            f"{_names(nodes, wrong)}: the gradient differs by {worst.difference:.1e} from the host's for the "
            f"same samples; rounding explains {worst.spread:.1e}, one sample makes {worst.one_sample:.1e}",
            "compare software and processor with the host's: `csdctl discover --verbose`; if they are equal, "
            "check that machine's memory, or try another number of threads in the plan",
        )
    if hidden := [at for at, rank in enumerate(ranks) if not rank.is_conclusive]:
        return _judge_hidden(verified, nodes, hidden)
    one_batch = verified.one_batch
    if one_batch and not one_batch.difference <= one_batch.tolerance:
        return Judgement(
            False,
            f"the gradient of one batch of all samples differs from that of the ranks' batches "
            f"by {one_batch.difference:.1e}, rounding explains {one_batch.spread:.1e}",
            "a layer or the loss compares the samples of a batch with each other: the gradient depends on "
            "how samples are divided among the ranks",
        )
    most = max(
        [*ranks, *filter(None, [one_batch])], key=lambda compared: compared.difference / compared.spread
    )
    spreads = most.difference / most.spread
    if spreads <= NEAR:
        return Judgement(True, f"equal: within the rounding of {verified.compared_in}")
    return Judgement(
        True,
        f"equal up to rounding: {spreads:.0f} times the rounding of "
        f"{verified.compared_in}; one sample makes {most.one_sample / most.difference:.0f} times as much",
    )


def _judge_not_finite(verified: Verified, nodes: Sequence[str]) -> Judgement:
    wrong = [at for at, rank in enumerate(verified.of_ranks) if not math.isfinite(rank.difference)]
    where = f"on {_names(nodes, wrong)} " if wrong else ""
    is_half = verified.dtype == "float16"
    return Judgement(
        False,
        f"inconclusive: the gradient of random samples {where}is 0 or not finite in {verified.dtype}",
        "use mixed_bfloat16 instead of mixed_float16"
        if is_half
        else "check the initial weights and data.input_range",
    )


def _judge_hidden(verified: Verified, nodes: Sequence[str], hidden: Sequence[int]) -> Judgement:
    worst = min((verified.of_ranks[at] for at in hidden), key=lambda rank: rank.one_sample)
    cause = (
        f"rounding in {verified.compared_in} moves the gradient by {worst.spread:.1e}, one sample by "
        f"{worst.one_sample:.1e}; {MIN_SHARPNESS:g} times as much is needed"
    )
    if worst.one_sample == 0:
        cause = "another sample has the same gradient"
    return Judgement(
        False,
        f"inconclusive for {_names(nodes, hidden)}: {cause}",
        "check the initial weights: with these, the gradient of random samples is lost in rounding, or does "
        "not depend on the samples",
    )


def _names(nodes: Sequence[str], positions: Sequence[int]) -> str:
    return format_node_names([nodes[at] for at in positions])


@dataclass(frozen=True)
class Verification:
    """The comparison, and the machine of every rank."""

    nodes: tuple[str, ...]
    result: Verified
    features: Mapping[str, Recomputed] = field(default_factory=dict)
    """Stored features compared with features computed now, by machine."""
    precision: str = FLOAT32
    """The type that features are stored in."""

    @property
    def verdict(self) -> Judgement:
        """What the comparison shows."""
        return judge(self.result, self.nodes)

    def check(self) -> None:
        """Raise RunError if a machine has stored other features than it computes now, or ranks differ."""
        # Values that differ by a rounding of float32 may be neighbours in float16.
        tolerance = 2**-10 if self.precision == FLOAT16 else FEATURE_TOLERANCE
        for node, recomputed in self.features.items():
            if not recomputed.difference <= tolerance:
                raise RunError(
                    f"its stored features differ by {recomputed.difference:.1e} from recomputed ones",
                    node=node,
                    remedy="remove them: `csdctl clean --computed`; check for failing memory or disks there",
                )
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
            names = ", ".join(rank.node for rank in plan.ranks)
            raise InputError(
                f"the plan has one rank ({names}), which would be compared with itself; expected two or more",
                remedy=f"give all machines a batch size ({option('batch_size')} 16), or another plan "
                f"({option('plan')})",
            )
        prepared = prepare_in(space, job, events)
        events.say(f"starting {len(plan.ranks)} ranks")
        if job.noise:
            events.say("compared without clipping and noise: the samples are random, and none is private")
        return verify(plan, RunContext(job, prepared, space, events), request.options)


def verify(plan: Plan, context: RunContext, options: TrainOptions) -> Verification:
    """Run one step of all ranks. Return how it compares with one process. Raises what `train` raises."""
    run = context.space.project.new_scratch()
    strategy = choose_strategy(options, plan)
    resolved = resolve_run(plan.ranks, strategy, context, is_verification=True)
    recomputed = strategy.recompute_stored(resolved.data, resolved.model, context)
    spec = build_spec(resolved, run, TrainOptions())
    results: list[Verified] = []

    def record(event: object) -> None:
        if isinstance(event, Verified):
            results.append(event)

    run_ranks(resolved, spec, run, TrainOptions(), EventStream((record,)))
    shutil.rmtree(run.path, ignore_errors=True)
    if not results:
        raise RunError("the ranks ended without a comparison")
    nodes = tuple(rank.node for rank in plan.ranks)
    return Verification(nodes, results[0], recomputed, options.feature_precision)
