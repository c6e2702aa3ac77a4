"""What all unit tests share: they are side by side in processes that load TensorFlow once."""

import sys
from collections.abc import Iterator

import pytest

from tests.unit.transport.conftest import SshServer, running_server


@pytest.fixture(autouse=True)
def keep_the_threads_of_ranks() -> Iterator[None]:
    """Fail a test that starts TensorFlow here as no rank does: others could not set its threads."""
    was_started = _was_started_otherwise()
    yield
    if _was_started_otherwise() and not was_started:
        pytest.fail("TensorFlow was started without load_backend(): see worker/compute/built_models.py")


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with running_server(tmp_path_factory.mktemp("server") / "s") as running:
        yield running


def _was_started_otherwise() -> bool:
    tensorflow = sys.modules.get("tensorflow")
    if not hasattr(tensorflow, "config"):
        return False
    from tensorflow.python.eager.context import context

    has_threads = tensorflow.config.threading.get_intra_op_parallelism_threads() > 0
    return not has_threads and context()._context_handle is not None
