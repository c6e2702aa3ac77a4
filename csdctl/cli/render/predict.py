"""The output of `csdctl predict`."""

from csdctl.cli.render.features import ExtractScreen
from csdctl.workflows.predict.predict import PredictResult
from csdctl.workflows.predict.request import PredictRequest
from csdctl.workflows.workspace.partial_failure import failed_document


class PredictScreen(ExtractScreen):
    """Shows messages, the progress, and what was sent."""


def describe_result(found: PredictResult) -> str:
    """Return what was predicted, as a sentence."""
    by_machine = ", ".join(f"{name} {count:,}" for name, count in found.num_rows_of.items())
    earlier = found.num_rows - found.num_computed
    return (
        f"{found.output}: {found.num_rows:,} rows ({by_machine}); {found.num_computed:,} computed, "
        f"{earlier:,} found, in {found.elapsed_s:.1f} s"
    )


def predict_document(request: PredictRequest, found: PredictResult) -> dict[str, object]:
    """Return the `csdctl.predict/1` document."""
    return {
        "schema": "csdctl.predict/1",
        "model": str(request.model),
        "on": list(request.on),
        "want": request.want,
        "layer": request.layer,
        "output": str(found.output),
        "num_rows": found.num_rows,
        "num_computed": found.num_computed,
        "num_rows_of": found.num_rows_of,
        "num_missing": {name: found.num_missing.get(name) for name in found.missing},
        "failed": failed_document(found.missing),
        "elapsed_s": found.elapsed_s,
    }
