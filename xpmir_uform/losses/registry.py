"""Every loss there is: what the battery of tests walks."""

from xpmir_uform.losses.base import BatchLoss
from xpmir_uform.losses.choices import ChoicesLoss
from xpmir_uform.losses.contrastive import ContrastiveLoss
from xpmir_uform.losses.late_interaction import LateInteractionLoss
from xpmir_uform.losses.masked import MaskedLoss

LOSSES: dict[str, type[BatchLoss]] = {
    loss.NAME: loss for loss in (ContrastiveLoss, LateInteractionLoss, ChoicesLoss, MaskedLoss)
}
