"""The tasks of a rank, by the name in `RunSpec.task`."""

from importlib import import_module

from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.run_spec import TRAIN, TRAIN_SPLIT, TRIAL, TRIAL_SPLIT, VERIFY, VERIFY_SPLIT
from csdctl.worker.tasks.task import Task, TaskContext

TASKS = {
    TRAIN_SPLIT: "csdctl.worker.tasks.split:Split",
    TRIAL_SPLIT: "csdctl.worker.tasks.split:SplitTrial",
    TRAIN: "csdctl.worker.tasks.train:Train",
    TRIAL: "csdctl.worker.tasks.train:Trial",
    VERIFY: "csdctl.worker.tasks.verify:Verify",
    VERIFY_SPLIT: "csdctl.worker.tasks.verify:VerifySplit",
}
"""Name → module:class. A task's module is imported only when the task is requested."""


def make_task(context: TaskContext) -> Task:
    """Return the task of the context's run; raises WorkerError when its name is unknown."""
    name = context.spec.task.name
    if name not in TASKS:
        raise WorkerError(
            f"received the task {name!r}, expected one of {', '.join(TASKS)}",
            remedy="run `csdctl deploy` so that both sides have one version",
        )
    module, _, class_name = TASKS[name].partition(":")
    task: Task = getattr(import_module(module), class_name)(context)
    return task
