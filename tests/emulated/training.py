"""Start a training on the emulated fleet, break it, and read the events it leaves."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.emulated.running import CSDCTL
from tests.patience import communicate, eventually, wait_for

Kill = Callable[[Path, Path], None]
"""Kills a process of a run, in the directory of a project."""
LONG_RUN = ("--batch-size", "8", "--max-steps", "1000000", "--skip-doctor")


def start_run(demo: Path, *arguments: str, until: str = "Progress") -> tuple[subprocess.Popen[str], Path]:
    """Start `csdctl train`; return the process and its run directory after the first event `until`."""
    before = set((demo / ".csdctl" / "runs").glob("*"))
    process = subprocess.Popen(
        [str(CSDCTL), "train", *arguments],
        cwd=demo,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def new_run() -> Path | None:
        new_runs = set((demo / ".csdctl" / "runs").glob("*")) - before
        return next((run for run in new_runs if num_lines_with(until, run)), None)

    return process, wait_for(new_run, process, demo)


def stop_without_csd1(demo: Path, *arguments: str) -> Path:
    """Start a long training, end csd1's rank, and stop the run an epoch later; return the run."""
    process, run = start_run(demo, *LONG_RUN, *arguments, until="EpochEnd")
    kill_rank("csd1")(demo, run)
    wait_for(lambda: find_breaks(run), process, demo)
    before = len(events_of(run, "EpochEnd"))
    # An epoch has the samples that csd1 left.
    wait_for(lambda: len(events_of(run, "EpochEnd")) >= before + 4, process, demo)
    process.send_signal(signal.SIGINT)
    output, _ = communicate(process, demo)
    assert "csd1 is lost" in output
    assert nothing_is_left(demo, run)
    return run


def wait_until_all_train(process: subprocess.Popen[str], run: Path, num_breaks: int) -> None:
    """Wait until the run was broken so often, and rank 0 has done steps with all ranks since."""

    def all_train() -> bool:
        joined = events_of(run, "Joined")
        first, last = (event["batch_sizes"].keys() for event in (joined[0], joined[-1]))
        if len(find_breaks(run)) < num_breaks or first != last:
            return False
        _, _, since = (run / "events.jsonl").read_text().rpartition('"event":"Joined"')
        return '"event":"Progress","rank":0' in since

    wait_for(all_train, process, run.parents[2])


def find_breaks(run: Path) -> list[dict[str, Any]]:
    """Return the `Joined` events after a loss: rank 0 has gone on without a rank, or was lost itself."""
    return [event for event in events_of(run, "Joined")[1:] if event["lost"] or event["is_start"]]


def num_lines_with(word: str, run: Path) -> int:
    """Count the events so far with `word`; the last line may be incomplete."""
    events = run / "events.jsonl"
    return sum(word in line for line in events.read_text().splitlines()) if events.exists() else 0


def processes(*words: str) -> list[int]:
    """Return the pids of all processes with all `words` in their command line."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(word in line for word in words):
                pids.append(int(entry.name))
    return pids


def of_fleet(pids: list[int], demo: Path, program: str, node: str = "") -> list[int]:
    """Return those of `pids` in `demo`'s emulated fleet (in `node`) that run `program…`."""
    fleet_id = (demo / ".csdctl/emulated/fleet.id").read_text().strip()
    variables = {f"CSDCTL_EMULATED_FLEET={fleet_id}".encode()}
    variables |= {f"CSDCTL_EMULATED_NODE={node}".encode()} if node else set()

    def belongs(pid: int) -> bool:
        try:
            environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            name = Path(os.readlink(f"/proc/{pid}/exe")).name
        except OSError:
            return False
        return variables <= environment and name.startswith(program)

    return [pid for pid in pids if belongs(pid)]


def processes_of(run: Path, node: str, program: str, *words: str) -> list[int]:
    """Return the processes of a run for a node that run `program…` with these words in their command line."""
    pids = []
    for pid in processes(f"csdctl-run={run.name}/{node}", *words):
        with contextlib.suppress(OSError):  # it has ended
            if Path(os.readlink(f"/proc/{pid}/exe")).name.startswith(program):
                pids.append(pid)
    return pids


def kill_all(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_rank(node: str) -> Kill:
    return lambda demo, run: kill_all(
        of_fleet(processes_of(run, node, "python", "rank --spec"), demo, "python", node)
    )


def kill_host_rank(demo: Path, run: Path) -> None:
    kill_all(processes_of(run, "host", "python", "rank --spec"))


def kill_daemon(node: str) -> Kill:
    return lambda demo, run: kill_all(of_fleet(processes("prted"), demo, "prted", node))


def kill_mpirun(node: str) -> Kill:
    return lambda demo, run: kill_all(processes_of(run, node, "prterun"))


def nothing_is_left(demo: Path, run: Path) -> bool:
    return eventually(
        lambda: not processes(f"csdctl-run={run.name}") and not of_fleet(processes("prted"), demo, "prted")
    )


def events_of(run: Path, event_type: str) -> list[dict[str, Any]]:
    """Return the run's events of one type, in order of arrival; a line that is being written is left out."""
    events = []
    for line in (run / "events.jsonl").read_text().rpartition("\n")[0].splitlines():
        event = json.loads(line)
        if event["event"] == event_type:
            events.append(event)
    return events


def assert_all_read_once(run: Path, num_samples: int) -> None:
    """Assert that every sample of each epoch was read once, or is counted as lost; that all weights agree."""
    ends = events_of(run, "EpochEnd")
    assert ends
    hashes: dict[int, str] = {}
    for end in ends:
        assert hashes.setdefault(end["epoch"], end["weights_hash"]) == end["weights_hash"], end
        if end["rank"] == 0:
            assert end["global_samples"] + end["num_lost"] == num_samples, end


def hash_at_the_end(run: Path) -> str:
    """Return the hash of the final weights, equal on all ranks."""
    hashes = {event["weights_hash"] for event in events_of(run, "Finished")}
    assert len(hashes) == 1
    return hashes.pop()


def resumed_from(run: Path, number: int = 1) -> dict[str, Any]:
    """Return the `Joined` event after a break, from 1; assert that at most one step of any rank was lost."""
    again = find_breaks(run)[number - 1]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    before = [event for event in events[: events.index(again)] if event["event"] == "Progress"]
    epoch, step = max((event["epoch"], event["step"]) for event in before)
    resumed = again["epoch"], again["step"]
    assert resumed >= (epoch, step - 1), f"at {(epoch, step)} before the loss, resumed from {resumed}"
    return again
