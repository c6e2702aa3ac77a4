"""A run as a run of MLflow, through MLflow's own client."""

from csdctl.errors import InputError
from csdctl.reporting.results import RunResults
from csdctl.reporting.scalars import parameters_of, scalars_of

MISSING = "MLflow's client is not installed"
REMEDY = "pip install mlflow-skinny"
EXPERIMENT, MAX_BATCH, STATES = "csdctl", 1000, {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow takes at most 1000 metrics at once."""


def write_mlflow(run: RunResults, tracking_uri: str | None) -> str:
    """Log a run to the server or directory `tracking_uri`, or to MLflow's default; returns MLflow's run id.

    Raises InputError without MLflow, or when it refuses.
    """
    try:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise InputError(MISSING, remedy=REMEDY) from error
    try:
        client = MlflowClient(tracking_uri)
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT)
        name, start_ms = run.summary.run_id, int(run.series.start_s * 1000)
        logged = client.create_run(experiment, start_time=start_ms, run_name=name).info.run_id
        for key, value in parameters_of(run).items():
            client.log_param(logged, key, value)
        metrics = [Metric(s.name, s.value, int(s.time_s * 1000), s.step) for s in scalars_of(run)]
        for start in range(0, len(metrics), MAX_BATCH):
            client.log_batch(logged, metrics=metrics[start : start + MAX_BATCH])
        end_ms = int(run.series.end_s * 1000)
        client.set_terminated(logged, STATES.get(run.summary.state, "FAILED"), end_time=end_ms)
    except MlflowException as error:
        raise InputError(f"MLflow refused the run: {error}", remedy="check --tracking-uri") from error
    return str(logged)
