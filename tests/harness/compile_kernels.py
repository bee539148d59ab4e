"""Compiles every Triton kernel with its real block sizes for NVIDIA and AMD targets; no GPU is needed.

    python tests/harness/compile_kernels.py [--ops maxsim choice_loss] [--targets sm_90 gfx942] [--jobs 2]

Prints registers, shared memory and spills of each, and fails on a spill or on more shared memory than a target has.
Takes some minutes on two cores. Triton must not interpret: unset TRITON_INTERPRET.
"""

import argparse
import importlib
import inspect
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPS = ("pair_loss", "maxsim", "choice_loss")

# Shared memory that one program may use, in bytes.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


@dataclass(frozen=True)
class Resources:
    """What one kernel needs on one target: registers of a thread, shared bytes, bytes or registers spilled."""

    registers: int
    shared: int
    spills: int
    matrix_units: bool


def main() -> int:
    arguments = _arguments()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: the interpreter compiles nothing. Unset it.", file=sys.stderr)
        return 2
    work = [
        (op, target, index)
        for op in arguments.ops
        for target in arguments.targets
        for index in range(len(_cases(op, target)))
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        rows = pool.map(_compile_case, work, chunksize=4)
    print(f"{'kernel':56} {'target':7} {'registers':>9} {'shared':>7} {'spills':>6}  matrix units")
    failures = 0
    for label, target, result in rows:
        failures += _print_row(label, target, result)
    print(f"{len(rows)} kernels compiled, {failures} refused.")
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--targets", nargs="+", default=list(SHARED_LIMIT), choices=list(SHARED_LIMIT))
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at once")
    return parser.parse_args()


def _cases(op: str, target: str) -> list[Any]:
    """What the op's `compile_cases` lists; it may depend on the target."""
    cases = importlib.import_module(f"uform_kernels.ops.{op}.kernel").compile_cases
    return cases(target) if inspect.signature(cases).parameters else cases()


def _compile_case(work: tuple[str, str, int]) -> tuple[str, str, Resources | str]:
    """Label, target, and what the kernel needs there or why it does not compile."""
    op, target, index = work
    label, *case = _cases(op, target)[index]
    try:
        return label, target, _resources(_compile(target, *case), target)
    except Exception as error:  # a compiler fails in many ways, and the table is to show each
        return label, target, f"{type(error).__name__}: {str(error)[:300]}"


def _compile(
    target: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    # Tensors are aligned to 16 bytes, as a launch would find.
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    return triton.compile(source, target=gpu, options=options)


def _resources(compiled: Any, target: str) -> Resources:
    shared = compiled.metadata.shared
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers, scalar_spills, vector_spills = (
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "sgpr_spill_count", "vgpr_spill_count")
        )
        return Resources(registers, shared, scalar_spills + vector_spills, "v_mfma" in text)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage, code = _cuobjdump("--dump-resource-usage", binary), _cuobjdump("--dump-sass", binary)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, shared, stack, bool(re.search(r"HMMA|HGMMA|UTC\w*MMA", code)))


def _cuobjdump(option: str, binary: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, binary], capture_output=True, text=True, check=True).stdout


def _print_row(label: str, target: str, result: Resources | str) -> bool:
    """Prints one row; true when it must not pass."""
    if isinstance(result, str):
        print(f"{label:56} {target:7} does not compile: {result}")
        return True
    faults = ["SPILLS"] * (result.spills > 0) + ["TOO MUCH SHARED MEMORY"] * (result.shared > SHARED_LIMIT[target])
    units = "yes" if result.matrix_units else "no"
    print(
        f"{label:56} {target:7} {result.registers:9} {result.shared:7} {result.spills:6}  {units:3} {' '.join(faults)}"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
