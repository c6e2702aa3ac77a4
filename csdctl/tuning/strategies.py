"""Forecasts of the time of a training, from steps and measured parts. Pure.

Data-parallel, features and split learn the same and differ in time, in bytes and in what leaves a node. The
parts of a model, before and after a cut, are timed on the host as shares of its whole step, and
these shares are applied to the step times of all machines.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.prediction import RankModel, StepTime
from csdctl.perfmodel.spread import PRIOR_WEIGHT, Spread
from csdctl.placement.equation1 import Placed, place_shards, steps_per_epoch
from csdctl.tuning import measurements, search, stannis
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Strategy, StrategyPlan
from csdctl.worker.protocol.model_info import CutInfo, PartTimes
from csdctl.worker.protocol.run_spec import SplitSpec

MEASURED_BATCH = 32
BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in the FLOPs of both passes."""
MIN_CUT_DISTANCE = 0.03
"""Cuts closer than this share of the model's FLOPs are alike: FLOPs are no more precise."""
MIN_GAIN = 0.05
"""Another strategy than data-parallel is taken when the training takes less time by at least this share."""
CONFIRMED_SIGMA, MODELLED_SIGMA = 0.066, 0.111
"""Assumed relative error of the time of a training besides its steps, after a trial and without one."""
HOST_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Shares of a step's samples that the host may have of its own when the model is split."""
BASE64_GROWTH = 4 / 3
"""Bytes sent for a byte of features."""


@dataclass(frozen=True)
class Shares:
    """Parts of a model's step with the model cut after `layer`, as shares of the time of the whole step."""

    layer: str
    forward: float
    """Forward pass of the prefix."""
    backward: float
    """Backward pass of the prefix."""
    head: float
    cut_bytes: int = 0
    """Bytes of one sample's activations."""
    vector_bytes: int = 0
    """Bytes of the prefix's part of the vector that is summed."""

    @property
    def prefix(self) -> float:
        """Forward and backward pass of the prefix."""
        return self.forward + self.backward


def spread_cuts(cuts: Sequence[CutInfo], num_operations: int) -> list[CutInfo]:
    """Return `cuts` without cuts that are close to an earlier one. `num_operations` of the whole model."""
    kept: list[CutInfo] = []
    least = MIN_CUT_DISTANCE * num_operations
    for cut in cuts:
        if all(abs(cut.num_operations - earlier.num_operations) >= least for earlier in kept):
            kept.append(cut)
    return kept


def share_by_flops(cut: CutInfo, num_operations: int) -> Shares | None:
    """Return the parts of a step by their FLOPs. None where these, or the cut's bytes, are not known."""
    if not num_operations or not cut.num_bytes or not cut.num_operations:
        return None
    before = cut.num_operations / num_operations
    return Shares(
        cut.layer,
        forward=before * (1 - BACKWARD_SHARE),
        backward=before * BACKWARD_SHARE,
        head=1 - before,
        cut_bytes=cut.num_bytes,
        vector_bytes=measurements.NUMBER_BYTES * cut.num_trainable,
    )


def measured_shares(times: PartTimes, cuts: Sequence[CutInfo]) -> dict[str, Shares]:
    """Return the parts of a step by the layer of the cut."""
    by_layer, blank = {cut.layer: cut for cut in cuts}, CutInfo("", 0, 0, 0)
    return {
        part.layer: Shares(
            part.layer,
            forward=part.forward_s / times.step_s,
            backward=part.backward_s / times.step_s,
            head=part.head_s / times.step_s,
            cut_bytes=by_layer.get(part.layer, blank).num_bytes,
            vector_bytes=measurements.NUMBER_BYTES * by_layer.get(part.layer, blank).num_trainable,
        )
        for part in times.cuts
    }


class StrategyForecast(StrategyPlan):
    """The forecast of one strategy, as the plan lists it, with batch sizes."""

    batch_sizes: dict[str, int]
    """The host first, 0 where it has no samples of its own."""
    epoch_s: float
    first_run_s: float
    next_run_s: float

    def changed(self, **values: object) -> "StrategyForecast":
        """Return the forecast with other values."""
        return self.model_copy(update=values)


@dataclass(frozen=True)
class Training:
    """The samples and epochs of a training, the machines of its plan, and the costs of training together."""

    step_times: Mapping[str, StepTime]
    """The host first."""
    sum_s: Callable[[int], float]
    """Seconds of a sum of this many bytes over the ranks."""
    byte_s: float
    """Seconds of one byte between a node and the host, one way, with all nodes sending."""
    start_s: float
    """Seconds of a training besides its epochs: connecting, starting TensorFlow, linking the ranks."""
    process_s: float
    """The part of `start_s` until TensorFlow has started on all machines."""
    num_public: int
    num_private: Mapping[str, int]
    """By node. These nodes are in every plan."""
    num_validation: int
    epochs: int
    is_repeating: bool = False
    save_s: float = 0.0
    """Seconds at the end of an epoch in which the state and the best model are written."""
    evaluation_share: float = 0.0
    """The time of a forward pass of a sample relative to its share of a step."""

    def forecast_data_parallel(
        self,
        batch_sizes: Mapping[str, int],
        compute_s: Mapping[str, float],
        communication_s: float,
        vector_bytes: int,
    ) -> StrategyForecast:
        """Forecast training as in the trial of a plan. `compute_s`: of each rank in a step."""
        placed = self._place(batch_sizes)
        epoch_s = time_epoch(placed, lambda active: max(compute_s[name] for name in active) + communication_s)
        forecast = self._forecast(DATA_PARALLEL, "", batch_sizes, epoch_s + self._evaluation_s)
        return forecast.changed(sample_bytes=_bytes_per_sample(placed, 2 * vector_bytes), is_confirmed=True)

    def forecast_features(
        self, data_parallel: StrategyForecast, shares: Shares, feature_share: float
    ) -> StrategyForecast:
        """Forecast training the head on features, with the batch sizes of `data_parallel`.

        `shares`: of the model cut after its frozen part. `feature_share`: the time of a sample's features
        relative to its share of a step.
        """
        sizes, placed = data_parallel.batch_sizes, self._place(data_parallel.batch_sizes)
        samples = {shard.name: shard.num_samples - shard.num_repeated for shard in placed}
        samples[HOST_NAME] = samples.get(HOST_NAME, 0) + self.num_validation
        extraction_s = max(
            count * feature_share * self._sample_s(name) for name, count in samples.items() if name in sizes
        )

        def step_s(active: Collection[str]) -> float:
            compute_s = max(self.step_times[name].at(sizes[name]) * shares.head for name in active)
            return compute_s + self.sum_s(shares.vector_bytes)

        evaluation_s = self.num_validation * shares.head * self._sample_s(HOST_NAME)
        forecast = self._forecast(FEATURES, shares.layer, sizes, time_epoch(placed, step_s) + evaluation_s)
        return forecast.changed(
            first_run_s=self.process_s + extraction_s + forecast.next_run_s,
            sample_bytes=_bytes_per_sample(placed, 2 * shares.vector_bytes),
        )

    def forecast_on_host(
        self, by_all: StrategyForecast, shares: Shares, feature_bytes: int
    ) -> StrategyForecast:
        """Forecast training the head on the host alone, where that takes clearly less time than `by_all`.

        Only for public samples. `feature_bytes`: of one sample. They are sent in base64.
        """
        host = self.step_times.get(HOST_NAME)
        if host is None or len(by_all.batch_sizes) == 1:
            return by_all
        global_batch = sum(by_all.batch_sizes.values())
        placed = self._place(by_all.batch_sizes)
        num_fetched = sum(shard.num_samples for shard in placed if shard.name != HOST_NAME)
        fetch_s = num_fetched * feature_bytes * BASE64_GROWTH * self.byte_s
        num_steps = steps_per_epoch(self._place({HOST_NAME: global_batch}))
        evaluation_s = self.num_validation * self._sample_s(HOST_NAME)
        epoch_s = (num_steps * host.at(global_batch) + evaluation_s) * shares.head
        next_run_s = self.start_s + self.epochs * (epoch_s + self.save_s)
        on_host = by_all.changed(
            epoch_s=epoch_s,
            first_run_s=by_all.first_run_s - by_all.next_run_s + fetch_s + next_run_s,
            next_run_s=next_run_s,
            sample_bytes=feature_bytes * BASE64_GROWTH / self.epochs,
            trains_on_host=True,
        )
        return on_host if on_host.first_run_s < by_all.first_run_s * (1 - MIN_GAIN) else by_all

    def forecast_split(self, shares: Shares, limits: search.Limits) -> StrategyForecast | None:
        """Forecast the split with the batch sizes that take the least time. None: limits allow none."""
        host_shares = HOST_SHARES if self.num_public else HOST_SHARES[:1]
        all_sizes = [self._split_sizes(shares, limits, share) for share in host_shares]
        forecasts = [self.forecast_split_of(sizes, shares) for sizes in all_sizes if sizes is not None]
        return min(forecasts, key=lambda forecast: forecast.epoch_s, default=None)

    def forecast_split_of(self, sizes: Mapping[str, int], shares: Shares) -> StrategyForecast:
        """Forecast the split of the model with these batch sizes."""
        placed = self._place(sizes)
        epoch_s = time_epoch(
            placed, lambda active: self.split_step_s({name: sizes[name] for name in active}, shares)
        )
        forecast = self._forecast(SPLIT, shares.layer, sizes, epoch_s + self._evaluation_s)
        num_bytes = _bytes_per_sample(placed, 2 * shares.vector_bytes) + 2 * shares.cut_bytes
        return forecast.changed(sample_bytes=num_bytes)

    def split_step_s(self, batch_sizes: Mapping[str, int], shares: Shares) -> float:
        """Return the seconds of a step: the nodes' parts and the host's overlap, except one micro-batch.

            T = max(max_i (F_i + B_i), max_i F_i / m + max(H, L) + max_i B_i / m) + T_sum

        F and B: forward and backward pass of the prefix, H: the heads of all samples and the host's own
        samples, L: what crosses the links, m: micro-batches of a batch.
        """
        nodes = [name for name in batch_sizes if name != HOST_NAME and batch_sizes[name]]
        host_s = self.step_times[HOST_NAME].at(batch_sizes.get(HOST_NAME, 0))
        if not nodes:
            return host_s
        slowest_s = max(self.step_times[name].at(batch_sizes[name]) for name in nodes) * shares.prefix
        num_samples = sum(batch_sizes[name] for name in nodes)
        head_s = shares.head * num_samples * self._sample_s(HOST_NAME) + host_s
        link_s = 2 * shares.cut_bytes * num_samples * self.byte_s
        first_s = slowest_s / SplitSpec.num_micro_batches
        return max(slowest_s, first_s + max(head_s, link_s)) + self.sum_s(shares.vector_bytes)

    def correct(self, forecast: StrategyForecast, ratio: float) -> StrategyForecast:
        """Return a forecast whose steps take `ratio` times as long, by a trial of it or of another cut."""
        sizes, epoch_s = forecast.batch_sizes, forecast.epoch_s * ratio
        corrected = self._forecast(forecast.strategy, forecast.cut, sizes, epoch_s)
        return corrected.changed(sample_bytes=forecast.sample_bytes)

    def _forecast(
        self, strategy: Strategy, cut: str, batch_sizes: Mapping[str, int], epoch_s: float
    ) -> StrategyForecast:
        run_s = self.start_s + self.epochs * (epoch_s + self.save_s)
        return StrategyForecast(
            strategy=strategy,
            cut=cut,
            batch_sizes=dict(batch_sizes),
            epoch_s=epoch_s,
            first_run_s=run_s,
            next_run_s=run_s,
        )

    def _split_sizes(self, shares: Shares, limits: search.Limits, host_share: float) -> dict[str, int] | None:
        """Return batch sizes with which all nodes take as long, or None where the limits allow none."""
        host_size = round(limits.largest_global_batch * host_share)
        if host_share and not host_size:
            return None
        candidates = [
            RankModel(name, step_time.scaled(shares.prefix), name in self.num_private)
            for name, step_time in self.step_times.items()
            if name != HOST_NAME
        ]
        try:
            best = search.find_best(
                candidates, limits.without(host_size), lambda _: self.sum_s(shares.vector_bytes)
            )
        except stannis.TuningError:
            return None
        return {HOST_NAME: host_size, **best.batch_sizes}

    def _place(self, batch_sizes: Mapping[str, int]) -> list[Placed]:
        return place_shards(batch_sizes, self.num_private, self.num_public, is_repeating=self.is_repeating)

    def _sample_s(self, machine: str) -> float:
        return self.step_times[machine].at(MEASURED_BATCH) / MEASURED_BATCH

    @property
    def _evaluation_s(self) -> float:
        return self.num_validation * self.evaluation_share * self._sample_s(HOST_NAME)


def time_epoch(placed: Sequence[Placed], step_s: Callable[[Collection[str]], float]) -> float:
    """Return the seconds of an epoch. `step_s` of a step in which these ranks have samples."""
    total_s, done = 0.0, 0
    for end in sorted({shard.num_steps for shard in placed if shard.num_steps}):
        active = [shard.name for shard in placed if shard.num_steps >= end]
        total_s += (end - done) * step_s(active)
        done = end
    return total_s


def choose_strategy(forecasts: Sequence[StrategyForecast]) -> StrategyForecast:
    """Return the strategy that takes the least time: the first unless another takes clearly less."""
    first = forecasts[0]
    best = min(forecasts, key=lambda forecast: forecast.first_run_s)
    return best if best.first_run_s < first.first_run_s * (1 - MIN_GAIN) else first


def add_range(forecast: StrategyForecast, step_spread: Spread) -> StrategyForecast:
    """Return the forecast with the range of its first run. `step_spread`: of tried steps."""
    assumed = CONFIRMED_SIGMA if forecast.is_confirmed else MODELLED_SIGMA
    spread = Spread(step_spread.variance + assumed**2, PRIOR_WEIGHT)
    return forecast.changed(first_run_s_range=spread.range_of(forecast.first_run_s))


def _bytes_per_sample(placed: Sequence[Placed], step_bytes: int) -> float:
    """Return the bytes of a node in an epoch, for each of its samples."""
    most = max((shard.num_samples for shard in placed if shard.name != HOST_NAME), default=0)
    return steps_per_epoch(placed) * step_bytes / most if most else 0.0
