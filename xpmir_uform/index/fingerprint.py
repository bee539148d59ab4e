"""What tells one model's vectors from another's."""

import hashlib
import json
from typing import Any

import torch


def fingerprint(model: Any) -> str:
    """SHA-256, in hexadecimal, of a ``UFormEncoder``'s weights in float64 and of how it reads inputs.

    Moving a model to another device, or from float32 to float64, changes it as little as its vectors.
    """
    model.initialize()
    shapes = {
        modality.name: {name: getattr(shape, name) for name in sorted(type(shape).__getxpmtype__().arguments)}
        for modality, shape in sorted(model.shapes.items())
    }
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, list(value.shape)]).encode())
        digest.update(value.detach().to("cpu", torch.float64).contiguous().numpy().tobytes())
    return digest.hexdigest()
