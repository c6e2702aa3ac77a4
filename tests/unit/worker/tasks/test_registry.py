"""The registry of tasks, and that of collectives, against the names that csdctl may ask for."""

from importlib import import_module

from csdctl.worker.group.collective import COLLECTIVES
from csdctl.worker.protocol.orders import COLLECTIVE_NAMES
from csdctl.worker.protocol.run_spec import TRAIN, TRIAL, VERIFY
from csdctl.worker.tasks.registry import TASKS


def test_every_task_of_the_protocol_has_an_implementation() -> None:
    assert set(TASKS) >= {TRAIN, TRIAL, VERIFY}
    for place in TASKS.values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name).run)


def test_every_collective_of_the_protocol_has_an_implementation() -> None:
    assert tuple(COLLECTIVES) == COLLECTIVE_NAMES
