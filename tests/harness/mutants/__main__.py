"""Makes one mistake after another in a copy of the sources, and runs the tests that must notice it.

    python tests/harness/mutants [words of a mutant's layer or mistake]

First without any mistake, for tests that fail anyhow notice nothing. Writes nothing into the repository. Ends with
status 1 if a mutant survives.
"""

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]
COPIED = ("xpmir_uform", "kernels", "tests", "benchmarks", "experiments", "docs", "pyproject.toml", "README.md")


def copied(folder: Path) -> None:
    """The sources, copied to a folder."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def mutated(mutant: Mutant, folder: Path) -> None:
    """Makes the mistake in the copy."""
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times, expected once")
    path.write_text(text.replace(mutant.old, mutant.new))


def run(folder: Path, tests: tuple[str, ...]) -> None:
    """Runs some tests of the copy, in a process that has imported none of our modules; exits with pytest's status."""
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "kernels")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    import pytest

    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder)]
    os._exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def verdict(tests: tuple[str, ...], mutant: Mutant | None = None) -> tuple[str, str]:
    """``killed``, ``survived`` or what else happened, and the test that failed first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        if mutant:
            mutated(mutant, folder)
        process = multiprocessing.get_context("fork").Process(target=run, args=(folder, tests))
        process.start()
        process.join()
        lines = (folder / "output.txt").read_text(errors="replace").splitlines()
    failed = next((line.split(" - ")[0] for line in lines if line.startswith("FAILED")), "")
    said = {0: "survived", 1: "killed"}.get(process.exitcode or 0, f"pytest ended with {process.exitcode}")
    return said, failed.removeprefix("FAILED tests/") or "; ".join(lines[-1:])


def main() -> int:
    """Runs the mutants that the command line names, or all; prints a table."""
    wanted = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if wanted in f"{mutant.layer} {mutant.mistake}"]
    # Triton reads it when it is imported, which torch does. What is not ours is imported once for all.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for library in ("torch", "experimaestro", "lightning", "xpm_torch"):
        importlib.import_module(library)
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    said, failed = verdict(tuple(tests))
    if said != "survived":
        print(f"The tests do not pass without a mistake: {failed}")
        return 2
    survivors = 0
    print("| layer | mistake | result | first test that fails |\n| --- | --- | --- | --- |")
    start = time.monotonic()
    for mutant in chosen:
        said, failed = verdict(mutant.tests, mutant)
        survivors += said != "killed"
        print(f"| {mutant.layer} | {mutant.mistake} | {said} | `{failed}` |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} killed in {time.monotonic() - start:.0f} s.")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
