"""The action by which experimaestro exports a trained model once an experiment has ended."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xpm_torch.actions import ExportAction

import xpmir_uform


class ModelExport(ExportAction):
    """Exports a model as ``save_model`` does, to a folder or to the Hugging Face hub.

    The stock action makes hard links: writing to the exported weights would write to the checkpoint.
    """

    __xpmid__ = "uform.export"

    def get_hub(self) -> Any:
        """What writes to a folder and to the hub."""
        return _Hub(self.loader)


class _Hub:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def save_pretrained(self, folder: Path) -> None:
        """Writes the model to a folder."""
        xpmir_uform.save_model(self.loader, folder)

    def push_to_hub(self, repo_id: str, private: bool) -> None:
        """Writes the model to a repository of the hub, which is made if it is not there."""
        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder))
            HfApi().create_repo(repo_id, private=private, exist_ok=True)
            HfApi().upload_folder(repo_id=repo_id, folder_path=folder)
