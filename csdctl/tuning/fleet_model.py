"""The model of the fleet: an immutable value that each round of tuning replaces by a new one; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.class_model import ClassModel


@dataclass(frozen=True)
class FleetModel:
    """Step times of the fleet's machines, alone and together."""

    machines: tuple[str, ...]
    """The machines that train, in the order of the fleet; the host first unless it does not train."""
    classes: Mapping[str, ClassModel]
    """By name: 'host', or the key of the machine class for nodes."""
    vector_bytes: int = 0
    """Bytes that each rank contributes to a sum."""
    required: frozenset[str] = frozenset()
    """Machines that every plan must include: the host, and nodes with private data."""
    max_host_share: float = 1.0
    """The largest share of a step's samples that the host can have: it reads public samples alone."""
    collective_cost: CollectiveCost = field(default_factory=CollectiveCost)
    overhead_factor: float = 1.0
    """Time of a step without the sum, relative to the compute time of its slowest rank."""
    outlier_factors: Mapping[str, float] = field(default_factory=dict)
    """Step time relative to the machine class, of machines that differ from it."""

    @property
    def is_host_training(self) -> bool:
        """Whether the host may train; it is a rank in either case."""
        return self.machines[0] == HOST_NAME

    def class_name(self, machine: str) -> str:
        """Return the name of the class that `machine` belongs to."""
        return next(name for name, known in self.classes.items() if machine in known.machines)

    def class_of(self, machine: str) -> ClassModel:
        """Return the class that `machine` belongs to."""
        return self.classes[self.class_name(machine)]

    def with_class(self, name: str, changed: ClassModel) -> "FleetModel":
        """Return the model with class `name` replaced."""
        return replace(self, classes={**self.classes, name: changed})

    def step_times(self) -> dict[str, StepTime]:
        """Return the step time of each class; raises ValueError when one is unknown."""
        return {name: known.step_time() for name, known in self.classes.items()}

    def machine_step_times(self, step_times: Mapping[str, StepTime] | None = None) -> dict[str, StepTime]:
        """Return the step time of each machine from those of the classes, in the order of the fleet."""
        by_class = self.step_times() if step_times is None else step_times
        by_machine = {
            machine: by_class[name] for name, known in self.classes.items() for machine in known.machines
        }
        return {machine: self._scaled(machine, by_machine[machine]) for machine in self.machines}

    def sum_s(self, num_ranks: int) -> float:
        """Return the seconds of a sum over `num_ranks`."""
        return self.collective_cost.at(self.vector_bytes, num_ranks)

    def sum_s_of_training(self, num_training: int) -> float:
        """Return the seconds of a sum when `num_training` machines train; the host always takes part."""
        return self.sum_s(num_training + (not self.is_host_training))

    def _scaled(self, machine: str, step_time: StepTime) -> StepTime:
        factor = self.outlier_factors.get(machine, 1.0)
        return step_time if factor == 1.0 else step_time.scaled(factor)
