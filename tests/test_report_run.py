"""The report of a run: whatever the job went through, one page that needs nothing else."""

import base64
import json
import math
import os
import re
import shutil
import subprocess
import warnings
from html.parser import HTMLParser
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from xpmir_uform.commands import main
from xpmir_uform.learner.job_lock import only_one
from xpmir_uform.monitoring.telemetry import schema
from xpmir_uform.reports.job.folder import read_configuration, read_state
from xpmir_uform.reports.job.formatting import duration, number, size
from xpmir_uform.reports.job.page import PICTURES, SECTIONS, contents, render, report
from xpmir_uform.reports.job.plots import SHADES, STYLES, apart, plain, svg, wide
from xpmir_uform.reports.job.series import read_columns, thin

IDENTIFIER = "4f" * 32
START = 1_796_000_000.0
HOSTILE = "<script>alert('a')</script>\"><img src=x onerror=alert(1)>&amp; $\\frac{$ \u0007 \ud800 _"


def line(step, total=300, bad=()):
    """One line of a run that learns, as the learner would write it; at the steps ``bad`` nothing is finite."""
    loss = math.nan if step in bad else 2.5 * math.exp(-step / 90) + 0.5 + 0.05 * math.sin(step)
    before, lost = 4 * loss, sum(one <= step for one in bad)
    seconds, wait = 0.05 + 0.004 * math.cos(step), 0.03 if step % 50 == 0 else 0.002
    after = 0.0 if step in bad else min(5.0, before)
    return {
        "step": step, "epoch": 1 + (step - 1) // 100, "time": START + 0.06 * step,
        "loss": loss, "losses": {"contrastive": loss, "masked": loss / 2},
        "stats": {"contrastive/positive": 1 - loss / 3}, "lacking": {},
        "learning_rate": {"1/1": 1e-3 * min(1, step / 30), "2/1": 5e-4},
        "phase": {"1/1": "warmup" if step < 30 else "decay"},
        "gradient_norm": {"before": before, "after": after}, "clipped": before > 5, "skipped": step in bad,
        "counts": {"nan": lost, "inf": 0, "skipped": lost, "clipped": min(step, 40)}, "scale": None,
        "parameters": {"total": 1000, "trainable": 900, "frozen": {"image.*": 100}},
        "items": 64, "tokens": 4096, "bytes": 20480, "microbatches": 2,
        "seconds": {
            "step": seconds, "forward": seconds / 4, "loss": seconds / 8, "backward": seconds / 2, "optimizer": 0.002,
            "wait": wait,
        },
        "memory": {"predicted": None, "peak": 700 * 2**20},
        "window": {
            "steps": min(step, 100), "loss": loss, "lowest": None, "seconds": seconds + wait,
            "items_per_second": 64 / (seconds + wait), "tokens_per_second": 4096 / (seconds + wait),
            "wait_share": wait / (seconds + wait),
        },
        "percent": 100 * step / total, "eta_seconds": 0.06 * (total - step), "seed": 3, "backend": "chunked",
        "precision": "32-true", "identifier": IDENTIFIER,
    }  # fmt: skip


def encoded(entry):
    """A line of JSON, which has no NaN: it is a string there."""
    return re.sub(r"\bNaN\b", '"NaN"', json.dumps(entry)) + "\n"


def write_job(folder, lines, alerts=(), name="telemetry.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(map(encoded, lines)))
    if alerts:
        (folder / "alerts.jsonl").write_text("".join(map(encoded, alerts)))
    return folder


def alert(step, message="the gradient norm is 150, above 100"):
    values = {"value": 150.0, "threshold": 100.0, "message": message}
    return {"name": "gradient_norm", "step": step, "epoch": 1, "time": START + step, **values}


class Elements(HTMLParser):
    """Every tag with its attributes, and the text of each section."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.section = [], {}, ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"]

    def handle_data(self, data):
        self.text[self.section] = self.text.get(self.section, "") + data

    def pictures(self):
        found = [attributes["src"] for tag, attributes in self.tags if tag == "img"]
        assert all(source.startswith("data:image/svg+xml;base64,") for source in found)
        return [base64.b64decode(source.partition(",")[2]) for source in found]


def made(folder):
    """The page of a job, parsed; its pictures are well-formed, and neither they nor it refer to anything outside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elements = Elements(render(contents(folder, START)).decode())
    assert [attributes["id"] for tag, attributes in elements.tags if tag == "section"] == list(SECTIONS)
    for tag, attributes in elements.tags:
        assert tag not in ("script", "link", "iframe", "object"), tag
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    for drawn in elements.pictures():
        for element in ElementTree.fromstring(drawn).iter():
            outside = [v for name, v in element.attrib.items() if name.endswith("href") and not v.startswith("#")]
            assert not outside
            assert not element.tag.endswith(("script", "foreignObject"))
    return elements


@pytest.fixture
def job(tmp_path):
    """A job of 300 steps, four of them not finite."""
    lines = [line(step, bad=(120, 121, 122, 250)) for step in range(1, 301)]
    return write_job(tmp_path / IDENTIFIER, lines, [alert(200), alert(210, "again")])


def test_the_lines_of_these_tests_are_what_the_schema_wants(job):
    texts = (job / "telemetry.jsonl").read_text().splitlines()
    for place in (0, 119, 299):
        jsonschema.validate(json.loads(texts[place]), schema())
    jsonschema.validate(alert(3), {**schema()["$defs"]["alert"], "$defs": schema()["$defs"]})


# --- What the page says


def test_the_page_of_a_run(job):
    (job / "learner.done").touch()
    found = made(job)
    assert "300 lines of telemetry, of the steps 1 to 300: each step has its line." in found.text["summary"]
    assert "Step300 (100 %)" in found.text["summary"].replace("\n", "")
    assert "900 of 1,000 train" in found.text["summary"]
    assert "Time leftnothing" in found.text["summary"].replace("\n", "")
    assert found.text["alerts"].index("again") < found.text["alerts"].index("150, above 100")
    assert found.text["curves"].count("not finite at 4 steps (crosses)") == 3
    assert "frozen: image.*100" in found.text["environment"]
    titles = [attributes["alt"].split(":")[0] for tag, attributes in found.tags if tag == "img"]
    assert titles == [
        "Loss", "Losses by name", "Learning rate", "Gradient norm", "Steps counted since the start",
        "Items per second, mean of the window", "Tokens per second, mean of the window", "Where a step's time goes",
        "Wait for the loader, share of the window", "Microbatches of this rank", "Time since the first line", "Memory",
    ]  # fmt: skip
    assert "peak 700" in found.text["memory"] or "700 MiB" in found.text["memory"]


def test_every_panel_has_labels_with_units(job):
    shown = contents(job, START)
    labels = {panel.title: panel.label for name in PICTURES for panel in shown[name]}
    assert all(labels.values())
    assert labels["Where a step's time goes"] == "s / step"
    assert labels["Time since the first line"] == "s"
    assert labels["Memory"] == "MiB"
    drawn = svg(next(panel for panel in shown["throughput"] if panel.label == "tokens / s")).decode()
    assert ">tokens / s<" in drawn
    assert ">optimizer step<" in drawn


def test_equal_jobs_give_equal_pages(tmp_path):
    job = write_job(tmp_path, [line(1), line(2)])
    first = [path.read_bytes() for path in report(job, now=START)]
    assert [path.read_bytes() for path in report(job, now=START)] == first


@pytest.mark.parametrize(
    ("mark", "content", "name"),
    [
        ("learner.done", "", "done"),
        ("learner.failed", '{"code": 1, "reason": "failed"}', "failed"),
        ("learner.pid", '{"type": "local", "pid": OURS}', "running"),
        ("learner.failed", '{"code": 1, "reason": "timeout", "message": "SIGTERM was received"}', "stopped"),
        ("learner.failed", '{"code": 1, "reason": ["timeout"]', "failed"),
        ("learner.pid", '{"type": "slurm", "pid": 7}', "unknown"),
        ("learner.pid", '{"type": "local", "pid": 1e999}', "unknown"),
        ("learner.pid", "[" * 10_000, "unknown"),
        ("learner.pid", '{"type": "loc', "unknown"),
        (None, "", "unknown"),
    ],
)
def test_the_state_of_a_job(job, mark, content, name):
    if mark:
        (job / mark).write_text(content.replace("OURS", str(os.getpid())))
    with only_one(job):
        assert read_state(job).name == name


@pytest.mark.parametrize(
    ("host", "said"), [("4711 on elsewhere\n", "on another machine, elsewhere"), ("", "not known")]
)
def test_a_process_of_another_machine_is_not_judged(job, host, said):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (job / "learner.pid").write_text(json.dumps({"type": "local", "pid": gone.pid}))
    (job / ".training.lock").write_text(host)
    state = read_state(job)
    assert state.name == "unknown"
    assert said in state.why


def test_nothing_outside_of_the_folder_is_shown_or_written_over(job, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"code": 1, "reason": "hush"}')
    for name in ("x.failed", "params.json", "report.html", "report.png", ".report.html.part", "alerts.jsonl"):
        (job / name).unlink(missing_ok=True)
        (job / name).symlink_to(secret)
    (job / "telemetry-0001.jsonl").symlink_to("/dev/zero")
    aside = job / "checkpoints" / "damaged-step-00000001-0"
    aside.mkdir(parents=True)
    aside.with_name(f"{aside.name}.txt").symlink_to(secret)
    (job / "checkpoints" / "step-00000001").symlink_to(tmp_path)
    report(job, now=0.0)
    assert "hush" not in (job / "report.html").read_text()
    assert secret.read_text() == '{"code": 1, "reason": "hush"}'
    assert not (job / "report.html").is_symlink()


def test_a_killed_job(job):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (job / "learner.pid").write_text(json.dumps({"type": "local", "pid": gone.pid}))
    with only_one(job):
        pass
    assert read_state(job).name == "killed"
    found = made(job)
    assert ("span", {"class": "state killed"}) in found.tags
    assert "its process is gone" in found.text[""]


def test_no_alert_and_too_many(tmp_path):
    folder = write_job(tmp_path, [line(1), line(2)])
    assert "No alert was raised." in made(folder).text["alerts"]
    write_job(folder, [line(1), line(2)], [alert(step, f"alert {step}.") for step in range(1, 401)])
    text = made(folder).text["alerts"]
    assert "The newest 300 of 400 alerts" in text
    assert "alert 400." in text
    assert "alert 100." not in text


def test_nothing_is_ever_finite(tmp_path):
    lines = [line(step, bad=range(1, 6)) for step in range(1, 6)]
    found = made(write_job(tmp_path, lines))
    assert "not recorded" in found.text["summary"]
    assert "Newest: nan 5; inf 0" in found.text["curves"]


def test_one_step(tmp_path):
    found = made(write_job(tmp_path, [line(1)]))
    assert "1 line of telemetry" in found.text["summary"]
    assert len(found.pictures()) == 12


def test_values_at_the_edges_of_float32(tmp_path):
    lines = [line(step) for step in range(1, 8)]
    for entry, value in zip(lines, [3e38, -3e38, 1e-45, 0.0, 1e30, 5.0, 1.0], strict=True):
        entry["loss"] = entry["losses"]["masked"] = value
    made(write_job(tmp_path, lines))


def test_parts_are_joined_and_gaps_are_told(tmp_path):
    write_job(tmp_path, [line(step) for step in range(1, 41)], name="telemetry-0001.jsonl")
    write_job(tmp_path, [line(step) for step in range(41, 61)], name="telemetry-0002.jsonl")
    write_job(tmp_path, [line(step) for step in range(64, 81)])
    with (tmp_path / "telemetry.jsonl").open("a") as file:
        file.write(encoded(line(81))[:100])
    found = made(tmp_path)
    assert "77 lines of telemetry, of the steps 1 to 80: 3 without a line." in found.text["summary"]


def test_names_are_shown_and_never_obeyed(tmp_path):
    entry = line(1)
    for name in ("losses", "stats", "learning_rate"):
        entry[name] = {HOSTILE: 1.0, "b" * 5000: 2.0, "": 3.0}
    entry |= {"phase": {HOSTILE: HOSTILE}, "identifier": HOSTILE, "backend": HOSTILE}
    entry["parameters"]["frozen"] = {HOSTILE: 3}
    folder = write_job(tmp_path / "<b>$x$", [entry, {**entry, "step": 2}], [{**alert(1, HOSTILE), "name": HOSTILE}])
    config = {"id": 1, "type": HOSTILE, "identifier": HOSTILE, "fields": {HOSTILE: HOSTILE, "list": [HOSTILE]}}
    (folder / "params.json").write_text(json.dumps({"objects": [config]}))
    (folder / "learner.failed").write_text(HOSTILE.replace("\ud800", ""))
    found = made(folder)
    for section in ("alerts", "curves", "environment", "configuration"):
        assert "<script>alert('a')</script>" in found.text[section]


@pytest.mark.slow
def test_a_hundred_thousand_steps_stay_small_and_keep_their_spikes(tmp_path):
    text = encoded({**line(1), "step": "STEP", "loss": "LOSS"})
    with (tmp_path / "telemetry.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = 77 if step == 33_333 else 2 + math.sin(step)
            file.write(text.replace('"STEP"', str(step)).replace('"LOSS"', str(loss)))
    shown = contents(tmp_path, START)
    page = render(shown)
    assert len(page) < 3_000_000
    assert b"100,000 lines of telemetry" in page
    assert b"Downsampled: each point is the mean of up to 167 steps, the band" in page
    loss = next(panel for panel in shown["curves"] if panel.title == "Loss").curves["loss"]
    assert len(loss.steps) == 600
    assert loss.high.max() == 77


# --- Jobs that are none


def refused(capsys, *arguments):
    assert main(["report", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("xpmir-uform: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_what_is_no_job_is_refused_in_one_line(tmp_path, capsys):
    assert "is no folder, expected the folder of a job" in refused(capsys, tmp_path / "absent")
    assert "holds neither params.json nor telemetry.jsonl" in refused(capsys, tmp_path)
    (tmp_path / "params.json").write_text("{}")
    assert "has no telemetry.jsonl: the job has made no step yet" in refused(capsys, tmp_path)
    (tmp_path / "telemetry.jsonl").touch()
    assert "the telemetry has no line that can be read" in refused(capsys, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.json", "telemetry.jsonl"]


def test_the_command_says_where_the_files_are(tmp_path, capsys):
    job = write_job(tmp_path / "job", [line(1)], [alert(1)])
    assert main(["report", str(job), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "page.html"), str(tmp_path / "page.png")]
    assert main(["report", str(job)]) == 0
    assert (job / "report.html").is_file()
    assert Image.open(job / "report.png").size == (1600, 1850)
    assert sorted(path.name for path in job.iterdir()) == [
        "alerts.jsonl",
        "report.html",
        "report.png",
        "telemetry.jsonl",
    ]
    capsys.readouterr()
    for name in ("absent/page.html", "page.png"):
        assert "expected a name that ends with .html in a folder" in refused(capsys, job, "--output", tmp_path / name)


# --- Configuration and lineage


def test_a_configuration_that_two_hold_is_written_out_once(job):
    schedule = {"id": 1, "type": "CosineSchedule", "identifier": "aa11", "fields": {"learning_rate": 0.002}}
    holders = [
        {"id": n, "type": "Optimizer", "identifier": f"b{n}", "fields": {"scheduler": {"type": "python", "value": 1}}}
        for n in (2, 3)
    ]
    held = [{"type": "python", "value": n} for n in (2, 3)]
    fields = {"optimizers": held, "hooks": [], "logpath": {"type": "path", "value": "runs", "base": "job"}}
    task = {"id": 4, "type": "UFormLearner", "identifier": IDENTIFIER, "fields": fields}
    (job / "params.json").write_text(json.dumps({"objects": [schedule, *holders, task]}))
    text = made(job).text["configuration"]
    assert text.count("learning_rate") == 1
    assert "CosineSchedule, as above" in text
    assert "logpath: runs" in text


def test_a_damaged_configuration_is_told_and_the_rest_shown(job):
    for content in ("", "[]", "{}", '{"objects": []}', '{"objects": [{"id": 1}]}', "[" * 100_000):
        (job / "params.json").write_text(content)
        assert read_configuration(job)[0] is None
    assert "params.json cannot be read" in made(job).text["configuration"]


# --- Numbers and drawing


@pytest.mark.parametrize("steps", [1, 2, 599, 600, 601, 1000, 12345])
def test_thinning_keeps_extremes_means_and_order(steps):
    values = np.sin(np.arange(steps) * 12.9898) * 43758.5453 % 1
    values[:: max(2, steps // 7)] = np.nan
    curve = thin(np.arange(1, steps + 1), values, 600)
    assert len(curve.steps) == min(steps, 600)
    assert curve.bucket == math.ceil(steps / 600)
    assert (np.diff(curve.steps) > 0).all()
    if np.isfinite(values).any():
        assert np.nanmax(curve.high) == np.nanmax(values)
        assert np.nanmin(curve.low) == np.nanmin(values)
        assert curve.last == values[np.isfinite(values)][-1]
    starts = np.arange(len(curve.steps)) * steps // len(curve.steps)
    for bucket, middle in zip(np.split(values, starts[1:]), curve.middle, strict=True):
        finite = bucket[np.isfinite(bucket)]
        assert np.isnan(middle) if len(finite) == 0 else math.isclose(middle, finite.mean())


def test_a_loss_that_begins_later_has_no_value_before():
    columns = read_columns([line(1), {**line(2), "losses": {"late": 3.0}}, {"step": "torn"}, {**line(3), "losses": {}}])
    np.testing.assert_array_equal(columns.below("losses")["late"], [np.nan, 3.0, np.nan])
    assert columns.steps.tolist() == [1, 2, 3]


def luminance(color):
    return float(np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)))


def test_curves_and_areas_can_be_told_apart_in_grey():
    assert len({str(dashes) for _, dashes in STYLES}) == len(STYLES)
    shades = [luminance(shade) for shade in SHADES]
    assert min(abs(np.diff(shades))) > 0.2


def test_a_logarithmic_axis_is_chosen_for_spikes_alone():
    steps = np.arange(100)
    assert not wide([thin(steps, 2.0 + np.sin(steps), 600)])
    assert wide([thin(steps, np.where(steps == 50, 1e4, 1.0), 600)])
    assert not wide([thin(steps, np.where(steps == 50, 1e4, -1.0), 600)])


def test_names_of_events_do_not_cover_each_other():
    assert apart([(1, "warmup"), (2, "constant"), (90, "decay")], 5) == [(1, "warmup, constant"), (90, "decay")]


def test_long_and_unprintable_names_are_cut():
    assert plain("a" * 100) == "a" * 47 + "…"
    assert plain("a\u0000b") == "a\N{REPLACEMENT CHARACTER}b"


def test_numbers_are_read_easily():
    assert [duration(value) for value in (0.5, 65, 3725, math.nan, None)] == [
        "0.5 s", "1 min 05 s", "1 h 02 min", "not recorded", "not recorded",
    ]  # fmt: skip
    assert [number(value) for value in (3, 1234567, 0.000123456, math.inf)] == [
        "3", "1,234,567", "0.0001235", "not recorded",
    ]  # fmt: skip
    assert [size(value) for value in (0, 1023, 1024, 2**31)] == ["0 B", "1023 B", "1 KiB", "2 GiB"]


# --- A browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed"),
]


def browse(folder, page, *options):
    """What Chromium answers, without network, and what the page wrote to its console."""
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
    ]  # fmt: skip
    done = subprocess.run([CHROMIUM, *arguments, *options, page.as_uri()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, [text for text in done.stderr.splitlines() if "CONSOLE" in text]


def colored(picture, color):
    """How many points of a picture have a colour, up to rounding."""
    values = np.asarray(Image.open(picture).convert("RGB"), dtype=np.int64)
    return int((np.abs(values - np.round(np.array(to_rgb(color)) * 255)).sum(axis=2) < 12).sum())


class TestBrowser:
    pytestmark = browser

    def test_the_page_opens_from_disk_without_network_or_errors(self, job, tmp_path):
        page, _ = report(job)
        dom, errors = browse(tmp_path, page, "--dump-dom")
        assert errors == []
        for name in SECTIONS:
            assert f'<section id="{name}">' in dom
        assert dom.count("<img ") == 12

    def test_the_pictures_are_drawn(self, job, tmp_path):
        page, _ = report(job)
        shots = {}
        for name in ("whole", "bare"):
            shots[name] = tmp_path / f"{name}.png"
            browse(tmp_path, page, "--window-size=1100,6000", f"--screenshot={shots[name]}")
            page.write_text(re.sub(r'src="data:[^"]*"', 'src="data:image/svg+xml;base64,AAAA"', page.read_text()))
        assert Image.open(shots["whole"]).size == (1100, 6000)
        assert colored(shots["whole"], STYLES[1][0]) > 500 > 50 > colored(shots["bare"], STYLES[1][0])

    def test_hostile_names_do_nothing(self, tmp_path):
        entry = {**line(1), "losses": {HOSTILE: 1.0, "other": 2.0}, "identifier": HOSTILE}
        page, _ = report(write_job(tmp_path / "job", [entry], [alert(1, HOSTILE)]))
        dom, errors = browse(tmp_path, page, "--dump-dom")
        assert errors == []
        assert "<script" not in dom

    def test_negative_control_what_would_need_a_network_or_runs_is_an_error(self, tmp_path):
        page, _ = report(write_job(tmp_path / "job", [line(1)]))
        faults = '<img src="https://example.org/a.png"><script>alert(1)</script>'
        page.write_text(page.read_text().replace("</body>", f"{faults}</body>"))
        assert len(browse(tmp_path, page, "--dump-dom")[1]) == 2
