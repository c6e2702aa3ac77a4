"""What machines run over samples for features and for `predict`: a compiled forward pass, or Keras."""

from collections.abc import Callable

from csdctl.worker.data.arrays import Array, fields_of
from csdctl.worker.engine.forward import FORWARD, BatchedPass
from csdctl.worker.engine.step import GraphInfo, load_compiled
from csdctl.worker.protocol.run_spec import Prefix, Runtime


def forward_pass(
    part: Prefix, convert: Callable[[list[Array]], Array], runtime: Runtime, layer: str = ""
) -> BatchedPass:
    """Return what runs a model with the threads of `runtime`: its graph or, where it has none, Keras.

    `convert` makes the stored rows of the model's outputs, or of the output of `layer`. Raises WorkerError if
    the model cannot be run here, or has no such layer.
    """
    if part.compiled:
        info, session, state = load_compiled(part.compiled, GraphInfo, runtime)
        function, weights = session.find_all(info.functions)[FORWARD], session.tensors(state)
        return BatchedPass(lambda samples: function(weights, *fields_of(samples).values()).arrays(), convert)
    # To import it takes a slow node a second.
    from csdctl.worker.compute.compile import keras_pass

    return BatchedPass(keras_pass(part, layer, runtime), convert)


def feature_pass(prefix: Prefix, runtime: Runtime) -> BatchedPass:
    """Return what computes features. Raises WorkerError if the prefix cannot be run here."""
    return forward_pass(prefix, lambda outputs: outputs[0].astype(prefix.precision), runtime)
