"""Settings that YAML files set and experiment files turn into configurations."""

from typing import Annotated

from experimaestro import Config
from experimaestro.experiments import configuration
from pydantic import Field
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration

from xpmir_uform.batching.batcher import UFormBatcher
from xpmir_uform.batching.shape import BatchShape
from xpmir_uform.data.decoding.shapes import ImageShape
from xpmir_uform.data.sampling import BagSampler, BagSource
from xpmir_uform.learner.learner import UFormLearner
from xpmir_uform.losses.base import BatchLoss
from xpmir_uform.losses.forms import BalancedForm, PairForm, RankedForm, SigmoidForm
from xpmir_uform.model import PooledHead, UFormEncoder
from xpmir_uform.trainer.optimizers import adamw
from xpmir_uform.trainer.schedule import CosineSchedule
from xpmir_uform.trainer.trainer import UFormTrainer

Seeds = Annotated[list[int], Field(min_length=1)]
"""One training for each; at least one"""

FORMS: dict[str, type[PairForm]] = {form.NAME: form for form in (BalancedForm, RankedForm, SigmoidForm)}


def form_of(name: str) -> PairForm:
    """The form called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMS:
        raise ValueError(f"form is {name!r}, expected one of {', '.join(FORMS)}")
    return FORMS[name].C()


@configuration
class ModelSettings:
    """An encoder of texts and pictures with one pooled head."""

    depth: int = 2
    """Transformer blocks"""

    hidden: int = 128
    """Width of the blocks, a multiple of 128"""

    width: int = 128
    """Width of the embeddings"""

    patch_side: int = 8
    """Side of an image patch in pixels"""

    max_side: int = 32
    """Longest side of an image in pixels"""

    inverse_temperature: float = 10.0
    """Initial inverse temperature"""

    bias: float = -10.0
    """Initial bias of the scores"""

    def config(self, seed: int, **parts: Config) -> UFormEncoder:
        """The encoder; its initial weights are a function of ``seed``.

        Args:
            seed: of the initial weights.
            parts: further fields of the encoder: heads, and shapes of other modalities.
        """
        return UFormEncoder.C(
            depth=self.depth,
            hidden=self.hidden,
            seed=seed,
            image=ImageShape.C(patch_side=self.patch_side, max_side=self.max_side),
            pooled=PooledHead.C(width=self.width, inverse_temperature=self.inverse_temperature, bias=self.bias),
            **parts,
        )


@configuration
class TrainingSettings:
    """How a model is trained."""

    batch_size: int = 96
    """Bags of one step"""

    epochs: int = 10
    """Epochs"""

    steps_per_epoch: int = 70
    """Steps of one epoch"""

    learning_rate: float = 2e-3
    """Highest learning rate"""

    min_learning_rate: float = 0.0
    """Learning rate at the end"""

    warmup_steps: int = 50
    """Steps of linear warm-up"""

    weight_decay: float = 0.01
    """Weight decay of matrices and embeddings"""

    workers: int = 0
    """Processes that decode; changes no result"""

    devices: str = "1"
    """Devices; changes no result beyond rounding"""

    accelerator: str = "auto"
    """Kind of device"""

    precision: str = "32-true"
    """Fabric's precision"""

    def learner(
        self,
        model: UFormEncoder,
        source: BagSource,
        losses: list[BatchLoss],
        *,
        seed: int,
        augmentation=None,
        listeners=(),
        shape: BatchShape | None = None,
    ) -> UFormLearner:
        """The task that trains ``model`` on ``source``; ``shape`` bounds its microbatches."""
        schedule = CosineSchedule.C(
            learning_rate=self.learning_rate, min_learning_rate=self.min_learning_rate, warmup_steps=self.warmup_steps
        )
        return UFormLearner.C(
            random=Random.C(seed=seed),
            model=model,
            trainer=UFormTrainer.C(
                sampler=BagSampler.C(source=source),
                batch_size=self.batch_size,
                losses=losses,
                augmentation=augmentation,
                num_workers=self.workers,
                batcher=UFormBatcher.C(shape=shape),
            ),
            max_epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            optimizers=adamw(schedule, weight_decay=self.weight_decay),
            listeners=list(listeners),
            fabric_config=FabricConfiguration.C(
                precision=self.precision, accelerator=self.accelerator, devices=self.devices
            ),
        )
