"""Start a training on the emulated fleet, break it, and read the events it leaves."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csdctl.emulation.cgroups import list_cgroups
from csdctl.emulation.limits import cgroup_prefix
from tests.emulated.running import CSDCTL

END_DEADLINE_S = 30
STEPS = 80
SHORT_RUN = ("--batch-size", "48", "--max-steps", str(STEPS), "--skip-doctor", "--collective", "star")


def start_training(demo: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    """A training under way: `csdctl train` and its run directory, after the first steps of rank 0."""
    before = set((demo / ".csdctl" / "runs").iterdir())
    process = subprocess.Popen(
        [str(CSDCTL), "train", *SHORT_RUN, *arguments],
        cwd=demo,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for run in set((demo / ".csdctl" / "runs").iterdir()) - before:
            events = run / "events.jsonl"
            if events.exists() and "Progress" in events.read_text():
                return process, run
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the training did not begin: {process.communicate()[0]}")


def processes(*wanted: str) -> list[int]:
    """The pids of all processes whose command line holds all of `wanted`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if entry.name.isdigit() and all(word in line for word in wanted):
            found.append(int(entry.name))
    return found


def of_fleet(pids: list[int], demo: Path, program: str, node: str = "") -> list[int]:
    """Those of `pids` in `demo`'s emulated fleet (in `node`) whose program is called `program…`."""
    fleet_id = (demo / ".csdctl/emulated/fleet.id").read_text().strip()
    wanted = {f"CSDCTL_EMULATED_FLEET={fleet_id}".encode()}
    wanted |= {f"CSDCTL_EMULATED_NODE={node}".encode()} if node else set()

    def belongs(pid: int) -> bool:
        try:
            environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            name = Path(os.readlink(f"/proc/{pid}/exe")).name
        except OSError:
            return False
        return wanted <= environment and name.startswith(program)

    return [pid for pid in pids if belongs(pid)]


def kill_rank(node: str) -> Callable[[Path, Path], None]:
    def kill(demo: Path, run: Path) -> None:
        pids = of_fleet(processes("rank --spec", f"csdctl-run={run.name}/{node}"), demo, "python", node)
        assert len(pids) == 1
        os.kill(pids[0], signal.SIGKILL)

    return kill


def kill_daemon(node: str) -> Callable[[Path, Path], None]:
    def kill(demo: Path, run: Path) -> None:
        pids = of_fleet(processes("prted"), demo, "prted", node)
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return kill


def kill_mpirun(demo: Path, run: Path) -> None:
    pids = processes(f"csdctl-run={run.name}/csd0", f"csdctl-run={run.name}/csd1")
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def nothing_is_left(demo: Path, run: Path) -> bool:
    deadline = time.monotonic() + END_DEADLINE_S
    while time.monotonic() < deadline:
        if not processes(f"csdctl-run={run.name}") and not of_fleet(processes("prted"), demo, "prted"):
            return True
        time.sleep(0.2)
    return False


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind, in order of arrival."""
    found = []
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(json.loads(line)["line"].removeprefix("@csdctl "))
        if event["event"] == kind:
            found.append(event)
    return found


def hash_at_the_end(run: Path) -> str:
    """The weights that all ranks ended with."""
    hashes = {event["weights_hash"] for event in events_of(run, "Finished")}
    assert len(hashes) == 1
    return hashes.pop()


def unleash(demo: Path) -> None:
    """Let the nodes have all of the CPU: what follows is about faults, and most of its time is starting."""
    fleet_id = (demo / ".csdctl/emulated/fleet.id").read_text().strip()
    for group in list_cgroups(cgroup_prefix(fleet_id)):
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("max")
        else:
            (group / "cpu.cfs_quota_us").write_text("-1")


def goes_on_from(run: Path) -> dict[str, Any]:
    """How the second group of ranks began: at most one step is lost."""
    again = next(event for event in events_of(run, "Joined") if event["generation"] == 2)
    seen = max(event["step"] for event in events_of(run, "LinkLost"))
    assert seen - 1 <= again["step"] <= seen
    return again
