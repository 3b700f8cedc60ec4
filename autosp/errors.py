"""Every error autosp raises on purpose, in one place to import from; each is defined where it is raised."""

from .cost_model.errors import PlanningError
from .cost_model.hardware import HardwareError
from .cost_model.plan import PlanError
from .cost_model.planner import MemoryShort
from .fsdp import WrappingError
from .kernels.agree import DisagreementError
from .kernels.errors import AutospError
from .mesh import MeshError
from .passes.capture import CaptureError
from .passes.parts import ChangedParameterError
from .passes.pipeline import SequenceError, StrategyError
from .passes.place import RandomnessError
from .passes.verify import VerificationError
from .zero import ShardError

__all__ = [
    "AutospError",
    "CaptureError",
    "ChangedParameterError",
    "DisagreementError",
    "HardwareError",
    "MemoryShort",
    "MeshError",
    "PlanError",
    "PlanningError",
    "RandomnessError",
    "SequenceError",
    "ShardError",
    "StrategyError",
    "VerificationError",
    "WrappingError",
]
