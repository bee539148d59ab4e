"""The report of a run: one HTML page that needs nothing else, and one PNG."""

import base64
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from xpmir_uform.base.checked_files import replace_file
from xpmir_uform.monitoring.telemetry import read_alerts, read_telemetry
from xpmir_uform.reports.job import checkpoints as lineage
from xpmir_uform.reports.job import sections, tables
from xpmir_uform.reports.job.folder import check, read_configuration, read_histories, read_state
from xpmir_uform.reports.job.formatting import moment
from xpmir_uform.reports.job.plots import Panel, png, svg
from xpmir_uform.reports.job.series import read_columns

SECTIONS = ("summary", "alerts", "curves", "throughput", "memory", "lineage", "environment", "configuration")
PICTURES = ("curves", "throughput", "memory")


def picture(panel: Panel) -> dict[str, str]:
    """A panel as the template wants it: an image within the page."""
    return {"title": panel.title, "caption": panel.caption(), "data": base64.b64encode(svg(panel)).decode()}


def contents(job: Path, now: float) -> dict[str, Any]:
    """Everything that the page shows, panels not yet drawn.

    Raises:
        ValueError: the folder is no job with telemetry.
    """
    check(job)
    columns, alerts, state = read_columns(read_telemetry(job)), list(read_alerts(job)), read_state(job)
    configuration, unconfigured = read_configuration(job)
    checkpoints = lineage.read_checkpoints(job)
    newest = columns.newest
    identifier = str(newest.get("identifier") or job.resolve().name)
    resumes = lineage.resumes(checkpoints)
    return {
        "title": f"Run {identifier.rpartition('/')[2][:12]}",
        "identifier": identifier,
        "folder": str(job.resolve()),
        "sections": SECTIONS,
        "state": state,
        "newest": moment(newest.get("time")),
        "made": moment(now),
        "tiles": tables.tiles(columns, alerts, state.name == "done"),
        "notes": tables.notes(columns),
        "alerts": tables.alert_grid(alerts),
        "curves": [*sections.training(columns, resumes), *sections.validations(read_histories(job, configuration))],
        "throughput": sections.throughput(columns),
        "memory": sections.memory(columns),
        "statistics": tables.statistic_grid(columns),
        "parameters": tables.parameter_grid(columns),
        "lineage": lineage.lineage_grid(checkpoints),
        "resumes": lineage.resume_grid(checkpoints),
        "environment": lineage.environment_grid(newest, checkpoints),
        "configuration": configuration,
        "unconfigured": unconfigured,
    }


def render(shown: Mapping[str, Any]) -> bytes:
    """The page; names that hold markup are shown, never obeyed."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text())
    drawn = {name: [picture(panel) for panel in shown[name]] for name in PICTURES}
    # A lone surrogate, which JSON allows in a name, has no encoding.
    return template.render({**shown, **drawn}).encode(errors="replace")


def report(job: Path, page: Path | None = None, now: float | None = None) -> tuple[Path, Path]:
    """Writes the report of a job, whether it runs, is done or has failed.

    Args:
        job: its folder.
        page: where the page goes; None: ``report.html`` in the job's folder. The picture lies beside it, as ``.png``.
        now: what is written as the time of the report; None: the time.

    Returns:
        the page and the picture.

    Raises:
        ValueError: the folder is no job of a learner, or has no telemetry; the page has no folder, or another suffix.
        OSError: the report cannot be written.
    """
    page = page or job / "report.html"
    if page.suffix != ".html" or (page.parent != job and not page.parent.is_dir()):
        raise ValueError(f"the page is {page}, expected a name that ends with .html in a folder that is there")
    shown = contents(job, time.time() if now is None else now)
    panels = [panel for name in PICTURES for panel in shown[name]]
    replace_file(page, render(shown))
    replace_file(page.with_suffix(".png"), png(panels, f"{shown['title']}, {shown['state'].name}, {shown['newest']}"))
    return page, page.with_suffix(".png")
