"""Our own tuner: few probes of each kind of machine, where they teach most; the measuring is passed in.

Machines of one class share: in a round each of them may take another batch size. The first round spreads over
small sizes, which are quick. After it the fits say which batch sizes the best plan would have, and the next
rounds probe half of that and less, until every class was measured there: large steps take long, and a trial
of the plan measures those.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fit import Point, fit_step_time
from csdctl.tuning.stannis import Measure, TuningError

MAX_PROBES = 8
"""Of one class of machines."""
FIRST_SIZES = {1: (32,), 2: (8, 32), 3: (4, 12, 32)}
"""By the number of machines that measure in the first round."""
LEAP = 4
"""A batch is tried that is at most so many times the largest that fitted: memory may end in between."""
NEAR = 2.5
"""A probe tells of a size within this factor of it: a trial measures the planned size itself. Half of what is
planned is measured, and the plan moves a little with what that shows."""
MEMORY_NEAR = 1.25
"""Where memory ends, a larger size is worth no probe when it is within this factor of what was measured."""
LEAST_SIZES = 2
"""Of a class, remembered ones included. More probes make the line surer and the plan hardly better, because
the trial that follows says how high it lies (tests/bench/test_planning.py, with noise)."""
GUESSED_SHARES = (0.25, 0.5, 0.12)
"""What is probed first of a size that is only guessed, by machines: too large a one costs time or memory."""
AROUND = (0.5, 0.3)
"""Where the machines of a class probe, as shares of the planned size."""


@dataclass
class ClassState:
    """What is known of one class of machines."""

    machines: Sequence[str]
    probes: list[Point] = field(default_factory=list)
    """Those remembered from earlier tunings too."""
    in_step: float = 1.0
    """A step in a trial, beside others that compute and sum as in training, over one in a probe."""
    tried_sizes: list[int] = field(default_factory=list)
    """Of each trial that has shown it, its batch size."""
    num_new: int = 0
    max_new: int = MAX_PROBES
    max_size: int | None = None
    """No plan gives a machine more."""
    is_remembered: bool = False
    """An earlier tuning came to its trial: other settings were probed then."""
    guess: StepTime | None = None
    """What similar models suggest, before the first probe."""
    too_large: int | None = None
    """The smallest batch size that did not fit into memory."""

    @property
    def sizes(self) -> set[int]:
        """Batch sizes measured."""
        return {probe.batch_size for probe in self.probes}

    def cap(self, size: int) -> int:
        """`size`, or the largest that a plan can give."""
        return size if self.max_size is None else min(size, self.max_size)

    def fit(self) -> StepTime | None:
        """The step time in training as probes and trials show it, or the guess; None without either."""
        return fit_step_time(self.probes).scaled(self.in_step) if self.probes else self.guess

    def learn_in_step(self, size: int, ratio: float) -> None:
        """One more trial: its steps of `size` took `ratio` times what `fit` says. All trials count alike."""
        self.tried_sizes.append(size)
        self.in_step *= ratio ** (1 / len(self.tried_sizes))

    def is_settled(self, size: int) -> bool:
        """Whether the step at `size` is known: measured about there, and elsewhere too."""
        is_near = any(size / NEAR <= one <= size * NEAR for one in (*self.sizes, *self.tried_sizes))
        return is_near and len(self.sizes) >= LEAST_SIZES


def measure_classes(
    classes: Mapping[str, ClassState],
    measure: Measure,
    choose: Callable[[Mapping[str, StepTime]], Mapping[str, int]],
) -> dict[str, StepTime]:
    """Probe until every class is known well enough; returns the step time of each and adds to `classes`.

    `measure` takes batch sizes by machine, as Algorithm 1's does; `choose` gives the batch size each class
    would have in the best plan, from the fits so far; none for a class that has no part in it. Raises
    TuningError when a class fits at no size.
    """
    while True:
        fits = {name: fit for name, state in classes.items() if (fit := state.fit())}
        targets = choose(fits) if len(fits) == len(classes) else {}
        wanted = {name: _next_sizes(state, targets.get(name)) for name, state in classes.items()}
        if not any(wanted.values()):
            return fits
        _learn(classes, wanted, measure)


def _learn(classes: Mapping[str, ClassState], wanted: Mapping[str, Sequence[int]], measure: Measure) -> None:
    """One round: measure the `wanted` sizes of each class, each on another of its machines."""
    asked = {
        machine: size
        for name, sizes in wanted.items()
        for machine, size in zip(classes[name].machines, sizes, strict=False)
    }
    times = measure(asked)
    for state in classes.values():
        for machine in state.machines:
            if machine not in asked:
                continue
            size, time_s = asked[machine], times[machine]
            state.num_new += 1
            if time_s is None:
                state.too_large = min(size, state.too_large or size)
            else:
                state.probes.append(Point(size, time_s))
        if state.too_large and max(state.sizes, default=0) >= state.too_large:
            state.too_large = None  # it died of something else
        if not state.probes and (state.too_large == 1 or state.num_new >= state.max_new):
            samples = "even 1 sample" if state.too_large == 1 else f"{state.too_large} samples"
            raise TuningError(
                f"{state.machines[0]} cannot train {samples} at a time: out of memory",
                remedy="leave it out: `--exclude`, or `--no-host` for the host",
            )


def _next_sizes(state: ClassState, target: int | None) -> list[int]:
    """Batch sizes worth measuring next, at most one for each machine of the class; none when it is known."""
    count = min(state.max_new - state.num_new, len(state.machines))
    if count < 1:
        return []
    if not state.probes:
        if state.too_large is not None:
            return [max(1, state.too_large // LEAP)]
        if target is None:
            first = dict.fromkeys(state.cap(size) for size in FIRST_SIZES[min(count, max(FIRST_SIZES))])
            return list(first)
        guessed = dict.fromkeys(max(1, round(target * share)) for share in GUESSED_SHARES[:count])
        return sorted(guessed)
    if target is None:
        return []
    if state.is_settled(target):
        return []
    largest = max(state.sizes)
    limit = state.cap(min(LEAP * largest, state.too_large - 1 if state.too_large else LEAP * largest))
    if target > limit * NEAR:
        # Not there yet: as far as it goes, or, where memory ends, what is known is all there is.
        return [limit] if limit > largest * MEMORY_NEAR else []
    around = dict.fromkeys(min(limit, ceil(target * share)) for share in AROUND)
    if len(state.sizes) < 2:  # a line needs two
        around = dict.fromkeys(size for size in around if size not in state.sizes) or around
    return list(around)[:count]
