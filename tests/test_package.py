"""Packaging: both packages are in the wheel, and no folder of ours answers to the name ``kernels``."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import xpmir_uform

ROOT = Path(__file__).parents[1]
PLAIN = ["attention", "encoder", "packing", "pooling", "rotary"]


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
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"xpmir_uform", "uform_kernels"}


def test_the_wheel_works_from_another_folder(wheel, tmp_path):
    code = (
        "import importlib.util, uform_kernels, xpmir_uform;"
        "assert importlib.util.find_spec('kernels') is None;"
        "print(uform_kernels.__file__, xpmir_uform.Item.text('a'))"
    )
    environment = {"PYTHONPATH": str(wheel), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert str(wheel) in done.stdout


def test_kernels_is_not_importable_here():
    spec = importlib.util.find_spec("kernels")
    assert spec is None or str(ROOT) not in str(spec.submodule_search_locations)


def test_every_public_name_can_be_imported():
    assert len(xpmir_uform.__all__) > 20
    for name in xpmir_uform.__all__:
        assert getattr(xpmir_uform, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        xpmir_uform.nothing  # noqa: B018


@pytest.mark.parametrize("module", [*(f"xpmir_uform.model.{name}" for name in PLAIN), "uform_kernels"])
def test_plain_modules_work_without_any_framework(module):
    code = (
        "import sys\n"
        "for name in ('experimaestro', 'xpm_torch', 'lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        f"import {module}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT / "tests")
