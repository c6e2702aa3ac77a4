"""Reads the power of all machines during a run, once per second, and writes power.jsonl.

A thread for each machine that has a source waits for what a shell loop there prints, over the session that
is open anyway. A source that fails is reported once, its machine has no energy from then on, and the run
goes on.
"""

import csv
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Self

from csdctl.energy.sources import (
    REMEDIES,
    SCRIPTS,
    EnergyMeter,
    Reading,
    Spent,
    build_loop,
    parse_line,
    parse_meter,
)
from csdctl.errors import CsdctlError, DeadlineError
from csdctl.fleet.model import Fleet, PowerSource
from csdctl.notify import Say, make_printable, shorten
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import MEASURED, STATED, PowerLog, PowerRecord
from csdctl.transport.session import Session

RECORD_S = 5.0
"""Energy of at least so long is one record, so that a day of 36 nodes is no gigabyte."""
PATIENCE_S = 5.0
"""Maximum wait for a reading before the sampler checks whether the run has ended."""
MAX_ERROR_CHARS = 200
RETRY_S = 15.0
"""The pause after a failure."""


class PowerSampler:
    """Samples from `__enter__` to `__exit__`; nothing that goes wrong here reaches the run."""

    def __init__(self, run: RunDirectory, fleet: Fleet, sessions: Mapping[str, Session], say: Say) -> None:
        self._log, self._say = PowerLog(run), say
        self._powers = {name: power for name in sessions if (power := fleet.power_of(name))}
        self._sessions = sessions
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start_s = time.time()

    def __enter__(self) -> Self:
        self._start_s = time.time()
        for name, power in self._powers.items():
            if power.source not in ("constant", "csv"):
                thread = threading.Thread(target=self._sample, args=(name, power), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        for name, power in self._powers.items():
            if power.source == "csv":
                self._guard(_Recorder(name, power), self._import_meter)
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        end_s = time.time()
        for name, power in self._powers.items():
            if power.source == "constant":
                seconds = end_s - self._start_s
                self._write(_Recorder(name, power), end_s, Spent(seconds, (power.watts or 0.0) * seconds))
        self._log.close()

    def _sample(self, name: str, power: PowerSource) -> None:
        recorder = _Recorder(name, power)
        while not self._stopped.is_set():
            self._guard(recorder, self._follow_loop)
            self._stopped.wait(RETRY_S)

    def _guard(self, recorder: "_Recorder", sample: "_Sample") -> None:
        """Call `sample`; record why it ended, if it is not the end of the run, and say so once."""
        power = recorder.power
        try:
            sample(recorder)
        except (CsdctlError, OSError, ValueError, EOFError, RuntimeError, csv.Error) as error:
            if not self._stopped.is_set():
                text = shorten(make_printable(str(error) or type(error).__name__), MAX_ERROR_CHARS)
                if not recorder.has_failed:
                    self._write(recorder, time.time(), Spent(0.0, None), text)
                recorder.has_failed = True
                if not recorder.was_failure_said:
                    recorder.was_failure_said = True
                    self._say(f"{recorder.name}: power cannot be read ({power.source}): {text}")
                    self._say(f"  {REMEDIES[power.source]}")
        self._write_rest(recorder)

    def _follow_loop(self, recorder: "_Recorder") -> None:
        source = SCRIPTS[recorder.power.source]
        command = build_loop(source, source.argument(recorder.power))
        with closing(self._sessions[recorder.name].converse(command)) as conversation:
            while not self._stopped.is_set():
                try:
                    line = conversation.read_line(deadline_s=PATIENCE_S)
                except DeadlineError:
                    continue
                if reading := parse_line(line, source.parse):
                    self._take(recorder, *reading)

    def _import_meter(self, recorder: "_Recorder") -> None:
        """Record the rows that a power meter has written during the run."""
        with open(recorder.power.path, encoding="utf-8", errors="replace", newline="") as file:
            for time_s, watts in parse_meter(file):
                is_ours = self._start_s - 1 <= time_s <= time.time()
                if is_ours and (spent := recorder.meter.add(time_s, Reading(watts))):
                    self._write(recorder, time_s, spent)

    def _take(self, recorder: "_Recorder", machine_time_s: float, reading: Reading) -> None:
        recorder.until_s = time.time()
        if recorder.has_failed and not recorder.was_recovery_said:
            recorder.was_recovery_said = True
            self._say(f"{recorder.name}: power can be read again ({recorder.power.source})")
        recorder.has_failed = False
        spent = recorder.meter.add(machine_time_s, reading)
        if spent is None:
            return
        if spent.joules is None:
            self._write_rest(recorder)
            self._write(recorder, recorder.until_s, spent)
            return
        recorder.seconds += spent.seconds
        recorder.joules += spent.joules
        if recorder.seconds >= RECORD_S:
            self._write_rest(recorder)

    def _write_rest(self, recorder: "_Recorder") -> None:
        if recorder.seconds:
            self._write(recorder, recorder.until_s, Spent(recorder.seconds, recorder.joules))
            recorder.seconds = recorder.joules = 0.0

    def _write(self, recorder: "_Recorder", time_s: float, spent: Spent, error: str = "") -> None:
        power = recorder.power
        record = PowerRecord(
            time=round(time_s, 3),
            machine=recorder.name,
            source=power.source,
            origin=STATED if power.source == "constant" else MEASURED,
            seconds=round(spent.seconds, 3),
            joules=None if spent.joules is None else round(spent.joules, 6),
            idle_watts=power.idle_watts,
            includes_nodes=power.includes_nodes,
            error=error,
        )
        try:
            self._log.append(record)
        except OSError as problem:
            self._stopped.set()
            self._say(f"energy is no longer recorded: {problem}")


class _Recorder:
    """The energy of one machine since its latest record."""

    def __init__(self, name: str, power: PowerSource) -> None:
        self.name, self.power = name, power
        self.meter = EnergyMeter()
        self.seconds = self.joules = 0.0
        self.until_s = 0.0
        """When the latest reading arrived, in Unix time."""
        self.has_failed = False
        """Whether it has failed since the latest reading."""
        self.was_failure_said = self.was_recovery_said = False


_Sample = Callable[[_Recorder], None]
