"""What compiled layers call as it is, between their graphs. Importing this loads torch's compiler."""

from __future__ import annotations

import torch

from megalith.nn.recompute import keep_inputs

keep_inputs_outside = torch.compiler.disable(keep_inputs)
