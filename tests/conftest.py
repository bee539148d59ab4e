"""What tests of several layers share."""

import os

import pytest
import torch
from experimaestro import taskglobals
from experimaestro.xpmutils import DirectoryContext

if not torch.cuda.is_available():
    # Read when a kernel is defined: Triton kernels then run in its interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny tensors: on a busy machine a second thread costs more than it gives.
torch.set_num_threads(1)


@pytest.fixture
def execute():
    """Executes a task configuration in a folder, as its job would; answers the instance that ran."""
    environment = taskglobals.Env.instance()
    before = environment.taskpath

    def run(config, folder):
        path = folder / "workspace" / "jobs" / "task" / "job"
        path.mkdir(parents=True, exist_ok=True)
        environment.taskpath = path
        task = config.instance(context=DirectoryContext(path))
        task.execute()
        return task

    yield run
    environment.taskpath = before
