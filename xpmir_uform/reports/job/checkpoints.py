"""The checkpoints of a job, by their manifests: where each comes from, and each time that training was resumed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpmir_uform.base.checked_files import read_bytes
from xpmir_uform.checkpoints import manifest, store
from xpmir_uform.reports.job.formatting import flat, moment, number, size, text
from xpmir_uform.reports.job.tables import Grid

REASON_BYTES = 1 << 16
ASIDE = re.compile(r".+-step-\d+-\d+")

IN_ENVIRONMENT = ("device", "precision", "ranks", "versions", "git", "environment", "hashes")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found.

    Args:
        name: of its folder.
        time: when its manifest was written, in seconds since 1970; None if there is none.
        sha256: of its manifest, by which later ones name it.
        manifest: what the manifest says; empty if it cannot be read.
        remark: what is worth knowing of it: that it is the last, why it cannot be read, why it was set aside.
    """

    name: str
    time: float | None
    sha256: str = ""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""


def read_checkpoint(folder: Path, name: str, remark: str = "") -> Checkpoint:
    """Reads the manifest alone: the other files, which may be large, are not looked at."""
    path = folder / manifest.NAME
    written = path.stat().st_mtime if path.is_file() else None
    try:
        values = manifest.read(folder)
        return Checkpoint(name, written, manifest.reference(folder, values)["sha256"], values, remark)
    except (OSError, ValueError) as error:
        return Checkpoint(name, written, remark="; ".join(filter(None, (remark, str(error)))))


def read_checkpoints(job: Path) -> list[Checkpoint]:
    """The committed checkpoints by step, the best of each validation, and what was set aside."""
    folder = store.shelf_of(job)
    last = store.last_in(folder)
    committed = [folder / store.name_of(step) for step in store.steps_in(folder)]
    aside = sorted(path for path in store.folders_in(folder) if ASIDE.fullmatch(path.name))
    return [
        *(
            read_checkpoint(path, path.name, "last" if last is not None and path.name == store.name_of(last) else "")
            for path in committed
        ),
        *(
            read_checkpoint(path, f"best of listener {path.parent.name}")
            for path in sorted(job.glob("out/listeners/*/best"))
            if path.is_dir() and not path.is_symlink()
        ),
        *(read_checkpoint(path, path.name, why(path)) for path in aside),
    ]


def why(folder: Path) -> str:
    """The reason that lies beside a checkpoint that was set aside."""
    try:
        reason = read_bytes(folder.with_name(f"{folder.name}.txt"), REASON_BYTES).decode(errors="replace").strip()
    except (OSError, ValueError):
        reason = "no reason is there"
    return f"set aside: {reason}"


def newest_manifest(checkpoints: Sequence[Checkpoint]) -> Mapping[str, Any]:
    """That of the greatest step; empty if none can be read."""
    return max((one.manifest for one in checkpoints), key=lambda values: values.get("step", -1), default={})


def lineage_grid(checkpoints: Sequence[Checkpoint]) -> Grid:
    """One row per checkpoint, with the one that it was made from."""
    there = {one.sha256 for one in checkpoints}
    rows = [
        [
            one.name,
            number(one.manifest.get("step")) if one.manifest else "",
            moment(one.time),
            size(sum(file["size"] for file in one.manifest["files"].values())) if one.manifest else "",
            one.sha256[:12],
            origin(one.manifest, there) if one.manifest else "",
            one.remark,
        ]
        for one in checkpoints
    ]
    return Grid(["checkpoint", "step", "written", "size", "sha256", "made from", "remark"], rows)


def origin(values: Mapping[str, Any], there: set[str]) -> str:
    """The checkpoint that a manifest names as its predecessor."""
    previous = values.get("previous")
    if previous is None:
        return "the initial weights"
    task = "" if previous["identifier"] == values["identifier"] else f" of {previous['identifier']}"
    kept = "" if previous["sha256"] in there else ", no longer here"
    return f"step {number(previous['step'])}{task}, {previous['sha256'][:12]}{kept}"


def resumes(checkpoints: Sequence[Checkpoint]) -> list[int]:
    """The steps that training went on from, as the newest manifest lists them."""
    return [audit["source"]["step"] for audit in newest_manifest(checkpoints).get("audits", ())]


def resume_grid(checkpoints: Sequence[Checkpoint]) -> Grid:
    """Each time that training was resumed, as the newest manifest lists them."""
    rows = [
        [
            text(audit["time"]),
            f"{number(audit['source']['step'])} of {audit['source']['identifier']}",
            " to ".join(map(text, audit["ranks"])),
            text(audit["reason"] or "as it was"),
            "; ".join(f"{name}: {text(old)} to {text(new)}" for name, (old, new) in audit["fields"].items()),
        ]
        for audit in newest_manifest(checkpoints).get("audits", ())
    ]
    return Grid(["resumed at", "from step", "ranks", "reason", "what differed"], rows)


def environment_grid(line: Mapping[str, Any], checkpoints: Sequence[Checkpoint]) -> Grid:
    """What the run was made with: of the newest line, and of the newest manifest."""
    newest = newest_manifest(checkpoints)
    said = {name: line[name] for name in ("seed", "backend", "precision") if name in line}
    said |= {name: newest[name] for name in IN_ENVIRONMENT if newest.get(name) is not None}
    return Grid(["what", "value"], list(flat(said).items()))
