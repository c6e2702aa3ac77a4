"""Algorithm 1 on engines whose step time is a straight line: overhead + batch size / speed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.tuning.measurements import Point
from csdctl.tuning.stannis import MAX_ROUNDS, TuningError, tune_stannis

LIST = (4, 8, 16, 32, 64)
NO_POSITIVE = (0.0, -1.0, float("nan"), float("inf"))


@dataclass
class Engines:
    """Synthetic engines, measured like real ones; records every round."""

    step_time_s: Mapping[str, Callable[[int], float]]
    limits: Mapping[str, int] = field(default_factory=dict)
    noise: Callable[[], float] = lambda: 1.0
    rounds: list[dict[str, int]] = field(default_factory=list)

    def measure(self, sizes: Mapping[str, int]) -> dict[str, float | None]:
        self.rounds.append(dict(sizes))
        return {
            name: None if size > self.limits.get(name, size) else self.step_time_s[name](size) * self.noise()
            for name, size in sizes.items()
        }

    def tune(self, **options: object) -> dict[str, Point]:
        return tune_stannis(list(self.step_time_s), self.measure, **options)  # type: ignore[arg-type]

    def sizes_of(self, name: str) -> list[int]:
        return [sizes[name] for sizes in self.rounds if name in sizes]


def linear(samples_per_s: float, overhead_s: float = 0.0) -> Callable[[int], float]:
    return lambda size: overhead_s + size / samples_per_s


def test_slowest_is_the_one_with_the_least_samples_per_s_not_the_longest_step() -> None:
    # Every step of csd0 takes longer at size 4 already; it makes up for it at 64.
    times = {"host": linear(2), "csd0": linear(50, 3.0)}
    tuned = Engines(times).tune()
    assert tuned["host"].batch_size == 4
    assert tuned["csd0"] == Point(4, times["csd0"](4))


@pytest.mark.parametrize("margin_scale", [5.0, 20.0])
@pytest.mark.parametrize("speed", [7.0, 31.0, 400.0])
def test_faster_engine_ends_at_the_final_time_or_one_step_beyond(speed: float, margin_scale: float) -> None:
    tuned = Engines({"host": linear(speed, 0.05), "csd0": linear(3, 0.05)}).tune(margin_scale=margin_scale)
    final_time_s = tuned["csd0"].step_time_s * (1 + 1 / margin_scale)
    last_step = max(1, tuned["host"].batch_size / margin_scale / 2)
    assert final_time_s <= tuned["host"].step_time_s <= final_time_s + (last_step + 1) / speed


def test_size_that_does_not_fit_is_the_upper_limit_from_then_on() -> None:
    engines = Engines({"host": linear(1000), "csd0": linear(5, 0.1)}, limits={"host": 100})
    tuned = engines.tune()
    assert tuned["host"].batch_size == 100
    failed = [size for size in engines.sizes_of("host") if size > 100]
    assert failed == sorted(failed, reverse=True)


def test_engine_that_fits_at_no_size_is_named() -> None:
    engines = Engines({"host": linear(50), "csd7": linear(5)}, limits={"csd7": 3})
    with pytest.raises(
        TuningError, match="csd7 cannot train even 4 samples at a time: out of memory"
    ) as raised:
        engines.tune()
    assert "use smaller batch_sizes, or leave it out: exclude csd7" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"batch_sizes": sizes}, "batch sizes of at least 1") for sizes in [(), (0,), (4, -1)]),
        *(({"step_divisor": value}, "^C must be a positive number, received") for value in NO_POSITIVE),
        *(({"margin_scale": value}, "^E must be a positive number, received") for value in NO_POSITIVE),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TuningError, match=message):
        Engines({"host": linear(50)}).tune(**options)


def test_too_small_steps_are_refused_after_a_bounded_number_of_rounds() -> None:
    engines = Engines({"host": linear(1e6), "csd0": linear(1, 0.1)})
    with pytest.raises(TuningError, match="C = 1000000.0 makes the steps too small"):
        engines.tune(step_divisor=1e6)
    assert len(engines.rounds) == len(LIST) + MAX_ROUNDS


@given(
    st.lists(st.builds(linear, st.floats(0.01, 1e5), st.floats(0, 30)), min_size=1, max_size=6),
    st.floats(0.1, 4),
    st.floats(0.1, 20),
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.lists(st.one_of(st.none(), st.integers(300, 1000)), min_size=6, max_size=6),
)
def test_any_fleet_is_tuned_within_the_bound(
    times: list[Callable[[int], float]],
    step_divisor: float,
    margin_scale: float,
    batch_sizes: list[int],
    limits: list[int | None],
) -> None:
    names = [f"csd{number}" for number in range(len(times))]
    allowed = {name: limit for name, limit in zip(names, limits, strict=False) if limit is not None}
    engines = Engines(dict(zip(names, times, strict=True)), allowed)
    try:
        tuned = engines.tune(batch_sizes=batch_sizes, step_divisor=step_divisor, margin_scale=margin_scale)
    except TuningError:  # an engine with a long fixed time a step, and steps too small for it
        tuned = {}
    assert list(tuned) in ([], names)
    assert len(engines.rounds) <= len(set(batch_sizes)) + MAX_ROUNDS
    assert all(size >= 1 for sizes in engines.rounds for size in sizes.values())
    for name, batch in tuned.items():
        assert 1 <= batch.batch_size <= allowed.get(name, batch.batch_size)
        assert batch.batch_size in engines.sizes_of(name)
