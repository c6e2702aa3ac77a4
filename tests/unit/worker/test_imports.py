"""What a node must have: the standard library, numpy, and TensorFlow, Keras and MPI once it trains."""

import subprocess
import sys

REFUSE = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {refused} or (top == "csdctl" and name.count(".") and not name.startswith("csdctl.worker")):
            raise ModuleNotFoundError(f"the worker imports {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import csdctl.worker
for module in pkgutil.walk_packages(csdctl.worker.__path__, "csdctl.worker."):
    importlib.import_module(module.name)
    print(module.name.removeprefix("csdctl.worker."))
"""
OURS = {"typer", "rich", "paramiko", "pydantic", "yaml", "asyncssh", "click"}
HEAVY = {"tensorflow", "keras", "mpi4py"}


def test_every_module_of_the_worker_is_imported_without_the_rest_and_before_tensorflow() -> None:
    program = REFUSE.format(refused=OURS | HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {
        "protocol.events",
        "data.prepared",
        "ingest.prepare",
        "ingest.sources.images",
        "tasks.train",
    } <= set(done.stdout.split())
