"""Packaging: both packages are in the wheel, and no folder of ours answers to the name ``kernels``."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import xpmir_uform
from xpmir_uform import datasets, model

ROOT = Path(__file__).parents[1]
PLAIN = ["attention", "encoder", "head_modules", "packing", "rotary"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs hatchling, which the extra 'dev' brings")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True,
        capture_output=True,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"xpmir_uform", "uform_kernels"}
    assert {"xpmir_uform/py.typed", "xpmir_uform/__init__.pyi", "uform_kernels/py.typed"} <= set(names)


def test_the_wheel_works_from_another_folder(wheel, tmp_path):
    code = (
        "import importlib.util, uform_kernels, xpmir_uform;"
        "assert importlib.util.find_spec('kernels') is None;"
        "print(uform_kernels.__file__, xpmir_uform.Item.text('a'))"
    )
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert str(installed) in done.stdout


def test_kernels_is_not_importable_here():
    spec = importlib.util.find_spec("kernels")
    assert spec is None or str(ROOT) not in str(spec.submodule_search_locations)


@pytest.mark.parametrize("package", [xpmir_uform, datasets, model])
def test_every_public_name_can_be_imported(package):
    assert len(package.__all__) > 8
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018


def test_what_users_subclass_is_public():
    """And what only the demonstrations use is not at the top."""
    bases = "AdditiveLoss BagSource BatchLoss ChoiceSet JointLoss PairForm Ranker RetrievalSet UFormExperiment".split()
    assert set(bases) <= set(xpmir_uform.__all__)
    assert not set(xpmir_uform.__all__) & set(datasets.__all__)


@pytest.mark.parametrize("module", [*(f"xpmir_uform.model.{name}" for name in PLAIN), "uform_kernels"])
def test_plain_modules_work_without_any_framework(module):
    code = (
        "import sys\n"
        "for name in ('experimaestro', 'xpm_torch', 'lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        f"import {module}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT / "tests")
