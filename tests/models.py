"""Every small single-device model the compiler is tried on, by name.

`MODELS[name](seq_len, batch, dtype)` gives `(module, inputs)`: call `module(**inputs)` and
differentiate its output, a scalar loss or a dict that holds one as "loss". The same arguments
give the same weights and inputs. `DROPOUT_MODELS` draw random numbers in train mode;
`OUTSIDE_LOSS` return what a caller computes a loss from.
"""

from __future__ import annotations

import models_architecture
import models_attention
import models_loss
import models_memory
import models_mixing
import models_recurrent
from models_common import Build
from torch import Tensor

FILES = (models_architecture, models_attention, models_loss, models_memory, models_mixing, models_recurrent)

MODELS: dict[str, Build] = {name: make for file in FILES for name, make in file.MODELS.items()}
DROPOUT_MODELS: dict[str, Build] = models_architecture.DROPOUT_MODELS
OUTSIDE_LOSS: dict[str, Build] = models_loss.OUTSIDE_LOSS

assert len(MODELS) == sum(len(file.MODELS) for file in FILES), "two models share a name"


def loss_of(output: Tensor | dict[str, Tensor]) -> Tensor:
    """The scalar to differentiate in what a model of MODELS or DROPOUT_MODELS returns."""
    return output["loss"] if isinstance(output, dict) else output
