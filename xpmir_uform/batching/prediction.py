"""Predicting the memory of a training run from its configuration, before anything is submitted.

The model is built of fake tensors, which have shapes and types but no values, and is measured as the batcher measures
the real one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from xpm_torch.optim import DuplicateParameterFilter

from xpmir_uform.batching.batcher import UFormBatcher
from xpmir_uform.batching.cost import CostModel, fit
from xpmir_uform.batching.packer import BagPacker
from xpmir_uform.batching.probing import probe, probe_lengths
from xpmir_uform.batching.sizes import BagSize
from xpmir_uform.data.items import Item
from xpmir_uform.data.segments import blank_text
from xpmir_uform.model.encoding import most_tokens
from xpmir_uform.model.packing import pack

TEXT_TOKENS = 64
"""Bytes of a text, unless the caller knows better."""

PROCESS_BYTES = 10**9
"""What a process takes before its first tensor: the context and the kernels of a GPU, or Python and its libraries."""

TYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}

ACCELERATORS = {"cpu": "cpu", "mps": "mps", "gpu": "gpu"}


class Footprint(NamedTuple):
    """Bytes of a training run on each device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int


def footprint(learner: Any, bag: Sequence[int] | None = None) -> Footprint:
    """The memory that a learner's configuration takes on each of its devices.

    Args:
        learner: a learner's configuration; it is left as it was.
        bag: tokens of the items of a typical bag; None: a text of 64 bytes, and the largest picture that the model
            reads or else another text.

    Returns:
        Activations are those of the heaviest microbatch: of the whole batch of a device, unless the batcher has a batch
        shape or is given the bytes to use. Temporary buffers are not counted.

    Raises:
        ValueError: a precision that is not one of Fabric's plain ones.
    """
    weights, autocast = types_of(learner.fabric_config.precision)
    batcher = learner.trainer.batcher and learner.trainer.batcher.copy().instance()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = learner.model.copy().instance()
        model.initialize()
        model.to(weights)
        cost = measured(model, batcher, autocast)
        optimizer = sum(state_bytes(made.copy().instance(), model) for made in optimizers_of(learner, model))
    parameters = list(model.parameters())
    return Footprint(
        weights=sum(parameter.nbytes for parameter in parameters),
        gradients=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        optimizer=optimizer,
        activations=heaviest(learner.trainer.batch_size, devices(learner.fabric_config), bag, batcher, cost),
    )
