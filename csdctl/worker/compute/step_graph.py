"""What the graph of a user's train_step does: which variables it writes, and which of them differ by rank.

A variable differs by rank when what is written to it depends on the rank's batch or its random numbers by
another way than through a sum over the ranks. Such a change is summed at the end of the step. A change that
does not depend on them is the same on every rank, such as that of a moving average of the weights.
"""

from collections.abc import Collection
from typing import Any

SUM_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""Types of the operation in which ranks sum: `tf.numpy_function`."""
DRAWING = (
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoissonV2",
)
"""Types of the operations that draw from a state of their own, which no step can set again."""


class StepGraph:
    """The writes of one traced step."""

    def __init__(self, graph: Any, own: Collection[int]) -> None:
        """`own`: the ids of the handles of variables that differ by rank before the step."""
        from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

        inner = {id(placeholder): handle for handle, placeholder in graph.captures}
        # While a function is traced, its variables are only those that its tapes watch.
        accessed = list(graph.variables) or list(graph._watched_variables)
        variables = {id(variable.handle): variable for variable in accessed}
        differing = set(own)
        """Ids of handles."""
        tensors: set[int] = set()
        """Ids of the tensors that differ by rank."""
        written: dict[int, Any] = {}
        self.drawing: list[str] = []
        """Types of operations that draw random numbers which cannot be repeated."""
        for operation in graph.get_operations():
            if operation.type in DRAWING:
                self.drawing.append(operation.type)
            reads, writes = (
                {id(inner[id(tensor)]) for tensor in found if id(tensor) in inner}
                for found in get_read_write_resource_inputs(operation)
            )
            values = [tensor for tensor in operation.inputs if id(tensor) not in inner]
            is_assigning = operation.type == "AssignVariableOp"
            reads_state = bool((reads | (set() if is_assigning else writes)) & differing)
            is_different = reads_state or any(id(tensor) in tensors for tensor in values)
            if operation.type in SUM_OPERATIONS:
                is_different = False
            elif operation.type == "Placeholder":  # of the batch, if it is not captured
                is_different = id(operation.outputs[0]) not in inner
            if is_different:
                tensors |= {id(tensor) for tensor in operation.outputs}
                differing |= writes
            elif is_assigning:
                differing -= writes
            for handle in writes:
                if handle in variables:
                    written.setdefault(handle, variables[handle])
        self.written = list(written.values())
        """The variables that the step writes, tf.Variables, in the order of their first write."""
        self.differing = [variable for handle, variable in written.items() if handle in differing]
        """Those whose new values differ by rank."""
