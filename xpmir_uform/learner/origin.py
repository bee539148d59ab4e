"""The checkpoint of another task, which a training begins with."""

from pathlib import Path

from experimaestro import Config, Meta, Param

from xpmir_uform.data.fields import default
from xpmir_uform.learner import manifest, shelf


class Checkpoint(Config):
    """A checkpoint: one with a known content, or the newest of a task that is to run first.

    ``output.checkpoints["last"]`` of a submitted learner is the latter, and its task is part of its identifier;
    :func:`checkpoint_at` makes the former.
    """

    __xpmid__ = "uform.checkpoint"

    path: Meta[Path]
    """Its folder, or that of a job that trained"""

    sha256: Param[str] = default("")
    """Of its manifest, which holds the hashes of all else; empty: what the task that it depends on leaves there"""

    def checked(self) -> Path:
        """The folder of the checkpoint.

        Raises:
            ValueError: there is another checkpoint, or a damaged one.
        """
        folder = shelf.resolve(Path(self.path))
        found = manifest.reference(folder, manifest.verify(folder))["sha256"]
        if self.sha256 and found != self.sha256:
            raise ValueError(
                f"the manifest of {folder} has the sha256 {found}, expected {self.sha256}: resume_from names another "
                "checkpoint than the one that lies there"
            )
        return folder


def checkpoint_at(path: Path) -> Checkpoint:
    """The configuration of the checkpoint at ``path`` (or of the newest one of the job there), named by its content.

    Raises:
        ValueError: it is damaged.
    """
    folder = shelf.resolve(Path(path)).resolve()
    return Checkpoint.C(path=folder, sha256=manifest.reference(folder, manifest.verify(folder))["sha256"])
