"""An emulated Cortex-A53 without Python becomes a node, and trains in step with this x86_64 host."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.small_jobs import frozen_model
from tests.emulated.training import events_of
from tests.lab.bare import bare_node
from tests.lab.lab import Lab
from tests.lab.project import Project
from tests.provision.conftest import NETWORK, provision

pytestmark = [pytest.mark.lab, pytest.mark.timeout(5400)]

MODEL = frozen_model(
    16, "Conv2D(8, 3, use_bias=False)", "BatchNormalization()", "ReLU()", "DepthwiseConv2D(3)"
)
JOB = """\
model: model.py:%s
data: {public: {path: public}}
recipe: {epochs: 2, optimizer: sgd, momentum: 0.9, learning_rate: 0.01, reference_batch: 16}
"""


def write_jobs(directory: Path) -> None:
    images = np.random.default_rng(7).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    (directory / "public").mkdir()
    np.save(directory / "public" / "images.npy", images)
    np.save(directory / "public" / "labels.npy", (images.mean((1, 2, 3)) * 4 % 4).astype(np.int64))
    (directory / "model.py").write_text(MODEL)
    for name, function in (("job", "build_trained"), ("frozen", "build")):
        (directory / f"{name}.yaml").write_text(JOB % function)


def test_bare_cortex_a53_trains_with_the_host(lab: Lab, project: Project, arm_bundle: Path) -> None:
    with bare_node(lab, "arm", 61, architecture="arm64") as node:
        project.use(node, network=NETWORK)
        write_jobs(project.path)
        assert provision(project)["nodes"]["arm"]["architecture"] == "aarch64"
        assert provision(project)["nodes"]["arm"]["tasks"]["changed"] == 0
        project.succeed("discover")

        verified = json.loads(project.succeed("verify", "job.yaml", "--json").stdout)
        print("verify:", json.dumps(verified, indent=1))

        options = ("--batch-size", "8", "--skip-doctor")
        project.succeed("train", "job.yaml", *options)
        hashes: dict[int, dict[int, str]] = {}
        (run,) = (project.path / ".csdctl/runs").iterdir()
        for event in events_of(run, "EpochEnd"):
            hashes.setdefault(event["epoch"], {})[event["rank"]] = event["weights_hash"]
        print("weights:", hashes)
        assert all(len(set(of_epoch.values())) == 1 for of_epoch in hashes.values())
        assert {len(of_epoch) for of_epoch in hashes.values()} == {2}

        by_features = ("--strategy", "features")
        project.succeed("train", "frozen.yaml", *by_features, *options)
        features = json.loads(project.succeed("verify", "frozen.yaml", *by_features, "--json").stdout)
        print("features:", json.dumps(features, indent=1))
        assert features["is_equal"]
