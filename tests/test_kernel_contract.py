"""What every kernel's folder holds, and what importing the kernels may bring in."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import uform_kernels

ROOT = Path(uform_kernels.__file__).parent / "ops"
OPS = sorted(folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists())
PUBLIC = {"pair_loss", "maxsim", "choice_loss"}


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_operation_is_public():
    assert set(OPS) == PUBLIC
    assert set(uform_kernels.__all__) >= PUBLIC


@pytest.mark.parametrize("op", OPS)
def test_every_folder_holds_the_same_files(op):
    missing = [
        name
        for name in ("__init__.py", "reference.py", "chunked.py", "kernel.py", "README.md")
        if not (ROOT / op / name).exists()
    ]
    assert not missing


@pytest.mark.parametrize("op", OPS)
def test_every_operation_takes_a_back_end_and_documents_itself(op):
    function = getattr(uform_kernels, op)
    assert inspect.signature(function).parameters["backend"].default == "auto"
    for word in ("Returns", "Raises", "backend"):
        assert word in function.__doc__


@pytest.mark.parametrize("op", OPS)
def test_compile_cases_name_every_argument(op):
    """What the compile check reads: a label, a kernel, and each of its arguments either typed or constant."""
    pytest.importorskip("triton")
    cases = importlib.import_module(f"uform_kernels.ops.{op}.kernel").compile_cases()
    assert len({case[0] for case in cases}) == len(cases) > 0
    for label, kernel, signature, constants, options in cases:
        assert set(kernel.arg_names) == set(signature) | set(constants), label
        assert {"num_warps", "num_stages", "enable_fp_fusion"} <= set(options), label


def test_imports_and_runs_without_triton():
    run(
        """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import torch
from uform_kernels import choice_loss, maxsim
offsets = torch.tensor([0, 1, 3])
assert maxsim(torch.ones(3, 4), offsets, torch.ones(3, 4), offsets).tolist() == [[4.0, 4.0], [4.0, 4.0]]
bytes_ = torch.tensor([1, 2], dtype=torch.uint8)
choice_loss(torch.zeros(1, 256), bytes_, torch.tensor([0, 2]), torch.tensor([0.5, 0.5]))
"""
    )


@pytest.mark.parametrize("module", ["uform_kernels", *(f"uform_kernels.ops.{op}.kernel" for op in OPS)])
def test_imports_nothing_above_torch(module):
    if module.endswith("kernel"):
        pytest.importorskip("triton")
    loaded = run(f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))").split()
    assert not {"experimaestro", "xpm_torch", "lightning", "xpmir_uform"} & set(loaded)


def test_importing_the_package_imports_no_triton():
    assert "triton" not in run("import sys, uform_kernels; print(*sys.modules)").split()
