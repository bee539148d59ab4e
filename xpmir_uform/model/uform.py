"""UFormEncoder: the encoder and its heads as one experimaestro module.

Letters: N items, T tokens, H hidden, W width of an embedding or token vector, G temperature groups, S answer slots, R
masked bytes, K masked patches of one modality, P values of one patch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from experimaestro import Param
from torch import Tensor
from xpm_torch import Module, ModuleLoader

from xpmir_uform.base.configuration import check_seed, default
from xpmir_uform.data.decoding.shapes import AudioShape, ImageShape, Shape, VideoShape
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.model.encoder import Encoder, check_size
from xpmir_uform.model.exporting import ModelExport
from xpmir_uform.model.heads import ByteHead, PatchHead, PooledHead, TokenHead
from xpmir_uform.model.inference.api import Inference
from xpmir_uform.model.initialisation import initialise
from xpmir_uform.model.packing import Packed, Reads
from xpmir_uform.model.weights import check_fit, load_weights, save_weights


class Outputs(NamedTuple):
    """What one forward pass answers; the fields of a head that the model lacks are None.

    Args:
        states: (T, H) final-norm states, in item order.
        embeddings: (N, W), not normalised.
        inverse_temperature: (G,) float32 or wider. It and ``bias`` are answers of the forward pass so that
            data-parallel wrappers reduce their gradients as any other parameter's.
        bias: (G,).
        tokens: (n, W) unit vectors of the tokens that ``packed.reads.kept`` names.
        bytes: (R, 256) logits of masked bytes.
        choices: (S, 256) logits of the answer slots.
        patches: (K, P) of each modality that the model reads beside text, for masked patches.
    """

    states: Tensor
    embeddings: Tensor | None = None
    inverse_temperature: Tensor | None = None
    bias: Tensor | None = None
    tokens: Tensor | None = None
    bytes: Tensor | None = None
    choices: Tensor | None = None
    patches: Mapping[Modality, Tensor] | None = None


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to norms, temperatures and biases.

    Args:
        name: as ``named_parameters`` of the model, or of a wrapper of it, gives it.
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] not in ("log_inverse_temperature", "bias")


class UFormEncoder(Inference, Module):
    """A transformer over the bytes of texts and the patches of images, videos and sounds, with its heads.

    The initial weights are a function of this configuration alone.
    """

    __xpmid__ = "uform.encoder"

    depth: Param[int]
    """Number of transformer blocks."""

    hidden: Param[int]
    """Width of the states, a multiple of 128."""

    image: Param[ImageShape | None] = default()
    """How images are read; None: they are refused."""

    video: Param[VideoShape | None] = default()
    """How videos are read; None: they are refused."""

    audio: Param[AudioShape | None] = default()
    """How sounds are read; None: they are refused."""

    pooled: Param[PooledHead | None] = default()
    """The head that gives one embedding of each item."""

    tokens: Param[TokenHead | None] = default()
    """The head that gives a vector of each token."""

    bytes: Param[ByteHead | None] = default()
    """The head that tells bytes: masked ones, and choices."""

    patches: Param[PatchHead | None] = default()
    """The head that tells masked patches."""

    seed: Param[int] = default(0)
    """Of the initial weights, in [0, 2**64)."""

    def __validate__(self):
        check_size(self.depth, self.hidden)
        check_seed("seed", self.seed)

    def __initialize__(self):
        self.build()
        initialise(self, self.seed, self.depth)

    def build(self) -> None:
        """Makes the modules, with weights that are still to be drawn or loaded."""
        with torch.random.fork_rng(devices=[]):
            patch_values = {modality: shape.patch_values for modality, shape in self.shapes.items()}
            self.encoder = Encoder(self.depth, self.hidden, patch_values)
            self.pooling = self.pooled.build(self.hidden) if self.pooled else None
            self.token_projection = self.tokens.build(self.hidden) if self.tokens else None
            self.byte_decoder = self.bytes.build(self.hidden) if self.bytes else None
            self.patch_decoders = self.patches.build(self.hidden, patch_values) if self.patches else None

    @property
    def shapes(self) -> Mapping[Modality, Shape]:
        """How each modality other than text is decoded."""
        given = {Modality.IMAGE: self.image, Modality.VIDEO: self.video, Modality.AUDIO: self.audio}
        return {modality: shape for modality, shape in given.items() if shape}

    def forward(self, packed: Packed) -> Outputs:
        """States and the answers of each head.

        Raises:
            ValueError: a modality that this model does not read.
        """
        states = self.encoder(packed)
        tokens, slots = states.tensor_split([packed.tokens])
        return Outputs(tokens, **self._pool(tokens, packed), **self._read(tokens, slots, packed.reads))

    def _pool(self, states: Tensor, packed: Packed) -> dict[str, Any]:
        if self.pooling is None:
            return {}
        return {
            "embeddings": self.pooling(states, packed.lengths),
            "inverse_temperature": self.pooling.inverse_temperature(),
            # A copy: data-parallel wrappers look for parameters in the graph of what is returned; a bare one has none.
            "bias": self.pooling.bias.clone(),
        }

    def _read(self, states: Tensor, slots: Tensor, reads: Reads) -> dict[str, Any]:
        """The answers of the other heads; each reads rows of ``states`` (T, H) or ``slots`` (S, H), if only none."""
        found: dict[str, Any] = {}
        if self.token_projection is not None:
            found["tokens"] = self.token_projection(states[reads.kept])
        if self.byte_decoder is not None:
            rows = torch.cat([states[reads.bytes], slots])
            found["bytes"], found["choices"] = self.byte_decoder(rows).tensor_split([len(reads.bytes)])
        if self.patch_decoders is not None:
            none = reads.bytes.new_zeros(0)
            found["patches"] = {
                modality: self.patch_decoders[modality.name.lower()](states[reads.patches.get(modality, none)])
                for modality in self.shapes
            }
        return found

    def export_action(self, loader: ModuleLoader, **kwargs: Any) -> ModelExport:
        """The action that exports these weights."""
        return ModelExport.C(loader=loader, **kwargs)

    def clamp_temperature(self) -> None:
        """Bound the learned inverse temperatures in place; to be called after each optimizer step."""
        if self.pooling is not None:
            self.pooling.clamp_temperature()

    def save_model(self, path: Path) -> None:
        """Write the weights to a ``.safetensors`` file, or to ``model.safetensors`` in a folder."""
        save_weights(self.state_dict(), path)

    def load_model(self, path: Path) -> None:
        """Read weights that :meth:`save_model` wrote; device and type of the model stay.

        Raises:
            ValueError: the file is damaged or of another model; the weights are then as they were.
        """
        self.initialize()
        weights = load_weights(Path(path))
        check_fit(weights, self.state_dict(), path)
        self.load_state_dict(weights)
