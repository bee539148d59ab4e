"""The checkpoint of another task, which a training begins with."""

import re
from pathlib import Path
from typing import Any, cast

from experimaestro import Config, Meta, Param

from xpmir_uform.base.configuration import default
from xpmir_uform.checkpoints import manifest, store

SHA256 = re.compile("[0-9a-f]{64}")


class Checkpoint(Config):
    """A checkpoint, named by its content or by the task that leaves it.

    :func:`checkpoint_at` makes the former, ``output.checkpoints["last"]`` of a submitted learner is the latter.
    """

    __xpmid__ = "uform.checkpoint"

    path: Meta[Path]
    """Its folder, or that of a job that trained"""

    sha256: Param[str] = default("")
    """Of its manifest, which holds the hashes of all else; empty: ``task`` names it"""

    task: Param[str] = default("")
    """The task that ends with it, as ``uform.learner/IDENTIFIER``, and is to run first; empty: ``sha256`` names it"""

    def __validate__(self):
        self._check_name()
        if self.task and cast(Any, self).__xpm__.task is None:
            raise ValueError(
                f"the checkpoint at {self.path} names the task {self.task} and does not depend on it: give "
                'checkpoints["last"] of what submitting that task returns, or checkpoint_at(path)'
            )

    def _check_name(self) -> None:
        if bool(self.sha256) == bool(self.task):
            raise ValueError(
                f"the checkpoint at {self.path} has the sha256 {self.sha256!r} and the task {self.task!r}, expected "
                "one of them, since its place is not a part of identifiers: checkpoint_at(path) takes the sha256"
            )
        if self.sha256 and not SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 is {self.sha256!r}, expected 64 hexadecimal digits: checkpoint_at(path) takes it")

    def checked(self) -> Path:
        """The folder of the checkpoint.

        Raises:
            ValueError: nothing names it, there is another checkpoint, or a damaged one.
        """
        self._check_name()
        folder = store.resolve(Path(self.path))
        found = manifest.reference(folder, manifest.verify(folder))
        for name, expected in (("sha256", self.sha256), ("identifier", self.task)):
            if expected and found[name] != expected:
                raise ValueError(
                    f"the manifest of {folder} has the {name} {found[name]}, expected {expected}: resume_from names "
                    "another checkpoint than the one that lies there"
                )
        return folder


def checkpoint_at(path: Path) -> Checkpoint:
    """The configuration of the checkpoint at ``path`` (or of the newest one of the job there), named by its content.

    Raises:
        ValueError: it is damaged.
    """
    folder = store.resolve(Path(path)).resolve()
    return Checkpoint.C(path=folder, sha256=manifest.reference(folder, manifest.verify(folder))["sha256"])
