"""What training on a machine does to the reads that the same cores serve, with and without limits.

    make bench ARGS="-k drive_io"

A process reads random blocks of 4 KiB from a file, past the page cache, one after another, while Keras trains
a convolutional network with a thread for each core. The limits are those of docs/how-to/run-in-production.md,
as control groups; root is needed for them. It is no CSD: there, firmware on other cores serves part of a
read. Prints figures, asserts no limits.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.emulation.limits import open_cgroup

SECONDS = 20
FILE_BYTES = 1 << 30
READER = """
import json, mmap, os, random, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
blocks, buffer, taken = os.fstat(descriptor).st_size // 4096, mmap.mmap(-1, 4096), []
end = time.monotonic() + float(sys.argv[2])
while (began := time.perf_counter()) and time.monotonic() < end:
    os.preadv(descriptor, [buffer], 4096 * random.randrange(blocks))
    taken.append(time.perf_counter() - began)
taken.sort()
shares = {"median_us": 0.5, "p99_us": 0.99, "p999_us": 0.999}
found = {name: 1e6 * taken[int(at * len(taken))] for name, at in shares.items()}
print(json.dumps(found | {"reads": len(taken)}))
"""
TRAINER = """
import keras, numpy as np
from keras import layers
blocks = [layers.Conv2D(64, 3, activation="relu") for _ in range(4)]
head = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
model = keras.Sequential([keras.Input((64, 64, 3)), *blocks, *head])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
data = np.zeros((64, 64, 64, 3), "float32"), np.zeros(64)
model.fit(*data, batch_size=16, epochs=1, verbose=0)
print("training", flush=True)
model.fit(*data, batch_size=16, epochs=10**6, verbose=0)
"""
LIMITS = {
    "no training": None,
    "training": (1.0, 100),
    "CPUWeight=20": (1.0, 20),
    "CPUQuota of half the cores": (0.5, 100),
    "both": (0.5, 20),
}
"""Share of the cores, and CPUWeight, whose default is 100."""


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", delete=False) as written:
        for _ in range(FILE_BYTES >> 20):
            written.write(os.urandom(1 << 20))
    yield Path(written.name)
    os.unlink(written.name)


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
def test_drive_io(file: Path) -> None:
    print(f"\nrandom reads of 4 KiB, one at a time, {SECONDS} s each, {os.cpu_count()} cores")
    for name, limits in LIMITS.items():
        group = trainer = None
        if limits:
            share, weight = limits
            group = open_cgroup(f"csdctl-bench-{os.getpid()}", share * (os.cpu_count() or 1))
            assert group, "no control groups here"
            files = {"cpu.weight": weight, "cpu.shares": weight * 1024 // 100}
            for file_name, value in files.items():
                if (group.path / file_name).exists():
                    (group.path / file_name).write_text(str(value))
            command = group.build_command([sys.executable, "-c", TRAINER])
            trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert trainer.stdout
            assert trainer.stdout.readline()
        try:
            command = [sys.executable, "-c", READER, str(file), str(SECONDS)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        finally:
            if trainer and group:
                trainer.kill()
                trainer.wait()
                group.close()
        found = json.loads(done.stdout)
        print(
            f"{name:28} {found['reads'] / SECONDS:7,.0f} reads/s, median {found['median_us']:.0f} µs, "
            f"99% {found['p99_us']:.0f} µs, 99.9% {found['p999_us']:.0f} µs"
        )
