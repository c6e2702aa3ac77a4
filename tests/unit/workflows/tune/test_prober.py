"""One machine's probe session: memory, hanging machines, killed workers."""

from contextlib import closing
from dataclasses import replace

import pytest

from csdctl.errors import RemoteCommandError
from csdctl.worker.protocol.json_codec import RESULT, from_json, to_frame
from csdctl.worker.protocol.probe import READY, ProbeRequest, ProbeResult, ProbeSpec
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.tune.probing import Prober, build_probe_command, count_busy_cores
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, MeasuredProject, prepared, run_context, workspace

COMMAND = ["python", "worker.pyz", "probe"]


def result(batch_size: int, peak_memory_bytes: int = 1000) -> str:
    return to_frame(RESULT, ProbeResult(batch_size, 0.1, 10, peak_memory_bytes))


def session(*replies: str, exit_code: int = 0, stderr: str = "") -> FakeSession:
    left = iter(replies)
    return FakeSession("csd0").on(
        "python", stdout=f"{READY}\n", replies=lambda line: [next(left)], exit_code=exit_code, stderr=stderr
    )


@pytest.mark.parametrize(
    ("peaks", "num_fitting"),
    [
        ({8: 700, 16: 900, 32: 0}, 2),  # not tried: 900 + 16 · 25 = 1300 bytes
        ({32: 1190, 16: 1190}, 2),  # above 90% of the memory, and yet it fitted
    ],
)
def test_size_that_is_predicted_not_to_fit_is_not_tried_unless_a_larger_one_did(
    peaks: dict[int, int], num_fitting: int
) -> None:
    with closing(Prober(session(*(result(*one) for one in peaks.items())), COMMAND, 1200)) as prober:
        prober.start()
        times = [prober.measure(ProbeRequest(size)).step_time_s for size in peaks]
    assert [bool(seconds) for seconds in times] == [number < num_fitting for number in range(len(peaks))]


def test_peak_of_the_process_is_not_recorded_for_a_smaller_size() -> None:
    with closing(Prober(session(result(8, 700), result(16, 900), result(8, 900)), COMMAND, None)) as prober:
        prober.start()
        for size in (8, 16, 8):
            prober.measure(ProbeRequest(size))
        assert prober.peaks[8] == 700


def test_worker_that_fails_otherwise_is_an_error_with_its_cause() -> None:
    noise = "I0000 00:00:1 port.cc] oneDNN custom operations are on\n"
    with closing(
        Prober(session(exit_code=1, stderr=f"{noise}ImportError: no numpy\n{noise}"), COMMAND, None)
    ) as prober:
        prober.start()
        with pytest.raises(RemoteCommandError, match="ImportError: no numpy") as raised:
            prober.measure(ProbeRequest(64))
    assert raised.value.node == "csd0"


def test_size_that_killed_the_worker_is_recorded() -> None:
    with closing(Prober(session(exit_code=137), COMMAND, None)) as prober:
        prober.start()
        outcome = prober.measure(ProbeRequest(64))
        assert outcome.step_time_s is None
        assert outcome.is_oom_kill


@pytest.mark.parametrize("noise", [None, Noise(1.0, 1.1, 1e-5)])
def test_noise_is_measured_on_nodes_with_private_samples(at: MeasuredProject, noise: Noise | None) -> None:
    data = prepared(at)
    data.private = {"csd0": PUBLIC}
    context = run_context(replace(at, job=replace(at.job, noise=noise)), workspace(at, {}), data)
    for name, is_private in (("csd0", True), ("csd1", False)):
        command = build_probe_command(name, context, Runtime())
        spec = from_json(ProbeSpec, command[command.index("--spec") + 1])
        assert (spec.noise, spec.is_private) == (noise, is_private)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("10.00 9\ncpu 100 0 50 900 7 0 0 0 0 0\n11.00 9\ncpu 220 0 80 950 9 0 0 0 0 0\n", 1.5),
        ("10.00 9\ncpu 100 0 50 900 7 0 0 0\n11.00 9\ncpu 100 0 50 1100 7 0 0 0\n", 0.0),
        ("", 0.0),
        ("10.00 9\ncpu x\n10.00 9\ncpu y\n", 0.0),
        ("10.00 9\ncpu 1 1 1 1 1 1 1 1\n10.00 9\ncpu 1 1 1 1 1 1 1 1\n", 0.0),
    ],
)
def test_busy_cores_are_counted_from_the_kernels_times(text: str, cores: float) -> None:
    assert count_busy_cores(text) == pytest.approx(cores)
