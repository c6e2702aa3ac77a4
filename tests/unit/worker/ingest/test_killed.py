"""A worker that computes features is killed: at most the batch that it was in is computed again."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.forward import BATCH_SIZE
from csdctl.worker.ingest.extract import extract
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.run_spec import DatasetSlice, Runtime
from tests.unit.worker.compute.test_lite import prefix_in

NUM_SAMPLES = 40 * BATCH_SIZE + 7
BEFORE_KILL = (9 * BATCH_SIZE, 20 * BATCH_SIZE)
PROGRAM = """\
import sys
import time
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.ingest.extract import extract
from csdctl.worker.protocol.features import ExtractSpec
from csdctl.worker.protocol.json_codec import from_json

spec = from_json(ExtractSpec, sys.stdin.readline())

def tell(progress):
    print("done", progress.num_done, flush=True)
    if progress.num_done >= int(sys.argv[1]):
        time.sleep(0.2)  # however slow this machine is, it is killed before it has computed all

extract(spec, load_backend, on_progress=tell)
"""


def run_until(spec: ExtractSpec, num_done: int) -> int:
    """Kill the group of a worker that has stored `num_done` samples; return how many it had stored."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(num_done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(to_json(spec) + "\n")
    process.stdin.close()
    stored = 0
    for line in process.stdout:  # until the end of what it has written before it was killed
        stored = int(line.split()[1])
        if num_done <= stored and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return stored


def test_killed_group_loses_at_most_its_batch(tmp_path: Path) -> None:
    images, labels = tmp_path / "images.npy", tmp_path / "labels.npy"
    generator = np.random.default_rng(0)
    np.save(images, generator.integers(0, 256, (NUM_SAMPLES, 12, 12, 3)).astype(np.uint8))
    np.save(labels, np.arange(NUM_SAMPLES, dtype=np.int32))
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (images, labels)]
    source = DatasetSlice(str(images), str(labels), images_sha256=hashes[0], labels_sha256=hashes[1])
    spec = ExtractSpec(source, str(tmp_path / "store"), prefix_in(tmp_path), Runtime())
    stored = [run_until(spec, num_done) for num_done in BEFORE_KILL]
    found = extract(spec, load_backend)
    num_kept = NUM_SAMPLES - found.num_computed
    print(f"\nkilled after {stored} of {NUM_SAMPLES} samples; {num_kept} were found")
    # What a killed worker had stored is not computed again; it was at work on one batch more.
    assert stored[0] < stored[1] <= num_kept < NUM_SAMPLES
    whole = extract(from_json(ExtractSpec, to_json(spec).replace("/store", "/other")), load_backend)
    assert (whole.parts[0].images_sha256, whole.num_computed) == (found.parts[0].images_sha256, NUM_SAMPLES)
