"""For which machine a model is planned, within what, or by which plan made before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .cost_model.amounts import AmountError, nbytes
from .cost_model.hardware import Hardware, load, names
from .cost_model.plan import Plan, PlanError
from .cost_model.planner import Follow, Planner
from .cost_model.problem import SAVES, Decide

# What backward may find of a layer, by the word for it: whatever is fastest and fits, or the same of every layer.
WORDS = ("none", "qkv", "attention", "full", "offload-qkv", "offload-attention", "offload")
MEMORY = {"auto": SAVES, **{word: (save,) for word, save in zip(WORDS, SAVES, strict=True)}}


def room(memory: str | float) -> tuple[float | None, tuple[str, ...]]:
    """Bytes a device that a plan may take (None: all there are), and what backward may find of a layer. Raises AmountError."""
    if isinstance(memory, str) and memory in MEMORY:
        return None, MEMORY[memory]
    try:
        return nbytes(str(memory)), SAVES
    except AmountError as error:
        raise AmountError(f"memory: {error}; or one of {', '.join(MEMORY)}") from None


@dataclass(frozen=True)
class Planning:
    """hardware: a machine of `cost_model/machines` by name, or a file that `autosp calibrate` wrote; None: what runs here.
    plan: one that was made before, or the file it is in. memory, saves: as `room` gives them. strict: raise MemoryShort where
    nothing fits.
    """

    hardware: str | Path | Hardware | None = None
    plan: Plan | str | Path | None = None
    memory: float | None = None
    saves: tuple[str, ...] = SAVES
    strict: bool = False

    def decide(self, device: torch.device) -> Decide:
        """The planner for a device. Raises HardwareError for a machine that is not known, PlanError for a file without a plan."""
        machine = self.hardware if isinstance(self.hardware, Hardware) else load(self.hardware or here(device))
        planner = Planner(machine, self.memory, self.saves, self.strict)
        return planner if self.plan is None else Follow(read(self.plan), planner)

    def compare(self, made: Plan) -> None:
        """Raises PlanError where a plan was given and the one just made is another."""
        if self.plan is None or (given := read(self.plan)).fingerprint == made.fingerprint:
            return
        raise PlanError(
            f"the plan given, {given.fingerprint}, is not for this model: the same strategies make it {made.fingerprint} here "
            f"({given.ranks} and {made.ranks} ranks, sequences {given.sequence} and {made.sequence}); fix: `autosp plan` for "
            "this model, its sequence length, ranks and outputs"
        )


def read(plan: Plan | str | Path) -> Plan:
    """A plan, from its file if it is in one. Raises PlanError."""
    if isinstance(plan, Plan):
        return plan
    try:
        return Plan.from_json(Path(plan).read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanError(f"cannot read the plan {plan}: {why}; fix: `autosp plan MODEL --json {plan}` writes one") from None


def here(device: torch.device) -> str:
    """The table of a device by its name; of a GPU that no table is for, that of the H100."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    large = torch.cuda.get_device_properties(device).total_memory > 60e9
    if "a100" in name:
        return "a100-80" if large else "a100-40"
    return next((table for table in names() if table in name), "h100")
