"""Telemetry: each step once whatever happens, in the form that the schema tells, and never a reason to stop."""

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import ClassVar

import jsonschema
import pytest
import torch
from experimaestro import Constant, taskglobals
from experimaestro.xpmutils import DirectoryContext
from invariance import job, run_here, run_ranks
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    Alerts,
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    UFormBatcher,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.monitoring import jsonl
from xpmir_uform.monitoring.jsonl import Journal
from xpmir_uform.monitoring.telemetry import Telemetry, Window, read_alerts, read_telemetry, schema

# --- The file


def steps_of(path):
    return [entry["step"] for entry in jsonl.read(path)]


def filled(path, count=9, part_bytes=0):
    made = Journal(path, part_bytes)
    for step in range(1, count + 1):
        assert made.append({"step": step})
    made.close()
    return made


@pytest.mark.parametrize("value", [0.1, 1e300, -0.0, math.inf, -math.inf, math.nan])
def test_every_number_round_trips_through_legal_json(value):
    line = jsonl.encode({"a": value, "b": {"c": value}, "d": "text", "e": None})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads(line, parse_constant=refuse)
    found = jsonl.decode(line)
    for number in (found["a"], found["b"]["c"]):
        assert repr(number) == repr(value)


def test_parts_are_cut_by_size_and_read_in_the_order_of_time(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    filled(path, count=40, part_bytes=len(jsonl.encode({"step": 1})) * 3)
    names = sorted(part.name for part in tmp_path.iterdir())
    assert names[:2] == ["telemetry-0001.jsonl", "telemetry-0002.jsonl"]
    assert names[-1] == "telemetry.jsonl"
    assert steps_of(path) == list(range(1, 41))
    assert [entry["step"] for entry in jsonl.read_last(path, 5)] == [36, 37, 38, 39, 40]
    assert len(jsonl.read_last(path, 99)) == 40


def test_ten_thousand_parts_are_in_order(tmp_path):
    for number in (9999, 10000, 2):
        (tmp_path / f"telemetry-{number:04d}.jsonl").write_bytes(jsonl.encode({"step": number}))
    (tmp_path / "telemetry-notes.jsonl").write_text("no part\n")
    assert steps_of(tmp_path / "telemetry.jsonl") == [2, 9999, 10000]


@pytest.mark.parametrize("part_bytes", [0, 30])
@pytest.mark.parametrize("step", [0, 1, 4, 5, 8, 9, 12])
def test_rewinding_drops_later_steps_and_goes_on(tmp_path, step, part_bytes):
    path = tmp_path / "telemetry.jsonl"
    filled(path, part_bytes=part_bytes)
    made = Journal(path, part_bytes)
    made.rewind(step)
    kept = min(step, 9)
    assert steps_of(path) == list(range(1, kept + 1))
    for number in range(kept + 1, 13):
        made.append({"step": number})
    assert steps_of(path) == list(range(1, 13))


@pytest.mark.parametrize("torn", [b'{"step": 10', b'{"step": 10}', b"\n", b"\xff\x00", b'{"step": 10}\n\x00\x00'])
def test_a_torn_end_is_dropped(tmp_path, torn):
    path = tmp_path / "telemetry.jsonl"
    filled(path)
    with path.open("ab") as file:
        file.write(torn)
    made = Journal(path)
    made.rewind(9)
    made.append({"step": 10})
    assert steps_of(path) == list(range(1, 11))


def test_a_damaged_line_costs_that_line_alone(tmp_path, caplog):
    path = tmp_path / "telemetry.jsonl"
    filled(path)
    content = path.read_bytes().replace(b'{"step": 4', b'{"st\x00p": 4')
    path.write_bytes(content)
    assert steps_of(path) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert f"line 4 of {path} cannot be read" in caplog.text
    Journal(path).rewind(7)
    assert steps_of(path) == [1, 2, 3, 5, 6, 7]


def test_any_flipped_bit_of_a_line_costs_that_line_alone(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    made = Journal(path)
    lines = [{"step": step, "loss": 0.5 + step, "lowest": None, "far": math.inf} for step in range(1, 4)]
    for line in lines:
        made.append(line)
    whole = path.read_bytes()
    start, end = whole.index(b"\n") + 1, whole.index(b"\n", whole.index(b"\n") + 1)
    for place in range(start, end):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert [*jsonl.read(path)] in ([lines[0], lines[2]], [lines[0]])


def test_lines_of_older_versions_are_read(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss": "NaN"}\n')
    Journal(path).append({"step": 3})
    assert steps_of(path) == [1, 2, 3]
    with path.open("a") as file:
        file.write('{"step": 4}\n')
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"step": ' + b"9" * 3_000_000 + b"}"], ids=["deep", "long"])
def test_a_line_beyond_all_bounds_is_left_out(tmp_path, line):
    path = tmp_path / "telemetry.jsonl"
    filled(path, 3)
    with path.open("ab") as file:
        file.write(line + b"\n")
    made = Journal(path)
    made.append({"step": 4})
    assert steps_of(path) == [1, 2, 3, 4]
    assert [entry["step"] for entry in jsonl.read_last(path, 2)] == [3, 4]
    made.rewind(2)
    assert steps_of(path) == [1, 2]


def test_damaged_alerts_stay_where_others_are_dropped(tmp_path):
    path = tmp_path / "alerts.jsonl"
    filled(path, 3)
    damaged = path.read_bytes().replace(b'"step": 2', b'"step": 7')
    path.write_bytes(damaged)
    Journal(path).keep(lambda entry: entry["step"] < 3)
    assert path.read_bytes() == b"".join(damaged.splitlines(keepends=True)[:2])


@pytest.mark.parametrize("kind", ["link", "link to a device", "pipe"])
def test_nothing_is_read_or_written_through_what_is_no_file(tmp_path, kind, caplog):
    path, other = tmp_path / "telemetry.jsonl", tmp_path / "other"
    other.write_bytes(jsonl.encode({"step": 1, "secret": 1}))
    {"link": lambda: path.symlink_to(other), "link to a device": lambda: path.symlink_to("/dev/zero")}.get(
        kind, lambda: os.mkfifo(path)
    )()
    (tmp_path / "telemetry-0001.jsonl").symlink_to(other)
    assert steps_of(path) == []
    made = Journal(path)
    made.rewind(0)
    made.append({"step": 1})
    assert [*jsonl.read(path)] == [{"step": 1}]
    assert other.read_bytes() == jsonl.encode({"step": 1, "secret": 1})
    assert sorted(found.name for found in tmp_path.glob("damaged-*")) == [
        "damaged-telemetry-0001.jsonl-0",
        "damaged-telemetry.jsonl-0",
    ]
    assert "was set aside as damaged-telemetry.jsonl-0, and is begun anew" in caplog.text


def test_a_full_disk_is_told_once_and_leaves_no_torn_line(tmp_path, monkeypatch, caplog):
    path = tmp_path / "telemetry.jsonl"
    made = filled(path, 3)
    write = os.write

    def full(descriptor, data):
        write(descriptor, data[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", full)
    assert not made.append({"step": 4})
    assert not made.append({"step": 5})
    monkeypatch.undo()
    assert made.append({"step": 6})
    assert path.read_bytes().count(b"\n") == 4
    assert steps_of(path) == [1, 2, 3, 6]
    assert caplog.text.count("training goes on without it") == 1


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    path = tmp_path / "telemetry.jsonl"
    write = os.write
    monkeypatch.setattr(jsonl.os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    filled(path)
    assert steps_of(path) == list(range(1, 10))


# --- Windows


def line(step, loss=1.0, seconds=1.0, wait=0.0, items=2, tokens=6):
    return {"step": step, "loss": loss, "seconds": {"step": seconds, "wait": wait}, "items": items, "tokens": tokens}


def test_a_window_holds_the_newest_steps():
    window = Window(3)
    found = [window.add(line(step, loss=float(step), seconds=1.0, wait=1.0)) for step in range(1, 6)]
    assert [one["steps"] for one in found] == [1, 2, 3, 3, 3]
    assert [one["loss"] for one in found] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert [one["lowest"] for one in found] == [None, None, 2.0, 2.0, 2.0]
    assert found[-1] | {"loss": 0, "lowest": 0} == {
        "steps": 3, "loss": 0, "lowest": 0, "seconds": 2.0, "items_per_second": 1.0, "tokens_per_second": 3.0,
        "wait_share": 0.5,
    }  # fmt: skip


def test_what_is_unknown_or_not_finite_is_so_in_the_window():
    window = Window(2)
    assert window.add(line(1, items=None, loss=None)) == {
        "steps": 1, "loss": None, "lowest": None, "seconds": 1.0, "items_per_second": None, "tokens_per_second": 6.0,
        "wait_share": 0.0,
    }  # fmt: skip
    window.add(line(2, loss=math.inf))
    assert math.isnan(window.add(line(3, loss=-math.inf))["loss"])
    assert window.lowest is None


def test_percent_and_remaining_time(tmp_path):
    made = Telemetry(tmp_path, {}, steps=8, window=2, part_bytes=0)
    found = [made.write(line(step, seconds=2.0, wait=1.0)) for step in range(1, 9)]
    assert [one["percent"] for one in found] == [12.5 * step for step in range(1, 9)]
    assert [one["eta_seconds"] for one in found] == [3.0 * (8 - step) for step in range(1, 9)]


def test_windows_go_on_after_a_resume(tmp_path):
    whole = Telemetry(tmp_path / "whole", {}, steps=9, window=4, part_bytes=0)
    losses = [5.0, 4.0, 1.0, 1.0, 6.0, 7.0, 2.0, 9.0, 3.0]
    expected = [whole.write(line(step, loss))["window"] for step, loss in enumerate(losses, 1)]
    for cut in range(1, 9):
        first = Telemetry(tmp_path / str(cut), {}, steps=9, window=4, part_bytes=0)
        for step, loss in enumerate(losses, 1):
            first.write(line(step, loss))
        second = Telemetry(tmp_path / str(cut), {}, steps=9, window=4, part_bytes=0)
        assert len(second.resume(cut, memory=2)) == min(cut, 4)
        rest = [second.write(line(step, loss))["window"] for step, loss in list(enumerate(losses, 1))[cut:]]
        assert rest == expected[cut:]


@pytest.mark.parametrize("foreign", ['{"step": 1}', '{"step": 1, "window": [1]}', '{"window": null, "step": "one"}'])
def test_telemetry_of_something_else_is_set_aside(tmp_path, foreign):
    (tmp_path / "telemetry.jsonl").write_text(f"{foreign}\n")
    telemetry = Telemetry(tmp_path, {}, steps=9, window=4, part_bytes=0)
    assert telemetry.resume(5, memory=2) == []
    telemetry.write(line(1, 2.0))
    assert steps_of(tmp_path / "telemetry.jsonl") == [1]


# --- What is promised of a line

DOCUMENTATION = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text()


def fields(node, prefix=""):
    for name, inner in node.get("properties", {}).items():
        yield f"{prefix}{name}", inner.get("description")
        yield from fields(inner, f"{prefix}{name}.")


def documented(heading):
    section = DOCUMENTATION.split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE))


@pytest.mark.parametrize(("heading", "node"), [("Fields", schema()), ("Alerts", schema()["$defs"]["alert"])])
def test_the_documentation_is_what_the_schema_says(heading, node):
    expected = {name: text for name, text in fields(node) if text}
    assert documented(heading) == expected


def test_the_schema_is_a_schema_and_every_object_in_it_is_closed():
    jsonschema.Draft202012Validator.check_schema(schema())

    def objects(node):
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object":
                yield node
            for inner in node.values():
                yield from objects(inner)

    for node in objects(schema()):
        assert node["additionalProperties"] is False
        assert {*node["properties"]} - {*node["required"]} <= {"crc"}


def checked(job):
    """The lines of a job, each as legal JSON, after the schema."""
    validator = jsonschema.Draft202012Validator(schema())
    alerts = jsonschema.Draft202012Validator({**schema()["$defs"]["alert"], "$defs": schema()["$defs"]})
    for path, one in [("telemetry*.jsonl", validator), ("alerts.jsonl", alerts)]:
        for part in job.glob(path):
            for text in part.read_text().splitlines():
                one.validate(json.loads(text))
    return list(read_telemetry(job))


# --- Whole runs

EPOCHS, STEPS = 3, 4
WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibex", "jay"]


class Words(BagSource):
    """A word and its reverse."""

    __xpmid__ = "test.telemetry-words"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(WORDS[index][::-1] + "?")])


class Killed(BaseException):
    """What no handler of errors catches."""


class KillAt(StepTrainingHook):
    """Ends the run before or after the making of a step, once."""

    __xpmid__ = "test.telemetry-kill"
    version: Constant[str] = "1"
    before_steps: ClassVar[set[int]] = set()
    after_steps: ClassVar[set[int]] = set()

    def before(self, state):
        self.end(self.before_steps, state.steps)

    def after(self, state):
        self.end(self.after_steps, state.steps)

    @staticmethod
    def end(steps, step):
        if step in steps:
            steps.discard(step)
            raise Killed


def config(devices=1, batcher=None, **params):
    return UFormLearner.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=Words.C()),
            batch_size=4,
            losses=[ContrastiveLoss.C(weight=0.5)],
            **({"batcher": batcher} if batcher else {}),
        ),
        max_epochs=EPOCHS,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2, warmup_steps=3, steps=10)),
        listeners=[],
        hooks=[KillAt.C()],
        fabric_config=FabricConfiguration.C(accelerator="cpu", devices=str(devices)),
        **params,
    )


def weights(folder):
    return load_file(job(folder) / "checkpoints" / "last" / "model.safetensors")


def without_clock(lines):
    """What two runs of one task share."""
    left_out = ("time", "seconds", "memory", "window", "eta_seconds")
    return [{name: value for name, value in line.items() if name not in left_out} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    job(folder).mkdir(parents=True)
    taskglobals.Env.instance().taskpath = job(folder)
    config().instance(context=DirectoryContext(job(folder))).execute()
    return folder


def test_every_step_has_a_line_of_the_schema(whole):
    lines = checked(job(whole))
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["epoch"] for line in lines] == [1] * 4 + [2] * 4 + [3] * 4
    assert {line["items"] for line in lines} == {8}
    assert {line["microbatches"] for line in lines} == {1}
    assert all(line["loss"] == 0.5 * line["losses"]["contrastive"] for line in lines)
    assert [line["phase"]["1/1"] for line in lines] == ["warmup"] * 3 + ["decay"] * 7 + ["floor"] * 2
    assert [line["learning_rate"]["2/1"] for line in lines[:4]] == pytest.approx([0, 1e-2 / 3, 2e-2 / 3, 1e-2])
    assert lines[-1]["percent"] == 100.0
    assert lines[-1]["eta_seconds"] == 0.0
    assert lines[-1]["window"]["steps"] == 12
    assert {(line["seed"], line["backend"], line["precision"], line["identifier"]) for line in lines} == {
        (3, "chunked", "32-true", "task/job")
    }
    assert lines[0]["parameters"]["total"] == sum(tensor.numel() for tensor in weights(whole).values())
    assert lines[0]["parameters"]["trainable"] == lines[0]["parameters"]["total"]
    assert not list(read_alerts(job(whole)))


def test_the_parts_of_a_step_are_not_longer_than_it(whole):
    for line in read_telemetry(job(whole)):
        seconds = line["seconds"]
        parts = seconds["forward"] + seconds["loss"] + seconds["backward"] + seconds["optimizer"]
        assert 0.0 < parts <= seconds["step"]


def test_tokens_and_bytes_are_those_of_the_items(whole):
    for line in read_telemetry(job(whole)):
        assert 8 * 3 <= line["bytes"] <= 8 * 5
        assert line["tokens"] >= line["bytes"]


def test_the_norm_is_that_of_the_whole_gradient_and_is_clipped_to_the_bound(execute, tmp_path, whole):
    free = list(read_telemetry(job(whole)))
    bound = sorted(line["gradient_norm"]["before"] for line in free)[4]
    execute(config(clip_norm=bound), tmp_path)
    lines = checked(job(tmp_path))
    assert any(line["clipped"] for line in lines)
    for line in lines:
        norm = line["gradient_norm"]
        assert line["clipped"] == (norm["before"] > bound)
        assert norm["after"] == min(norm["before"], bound)
    assert lines[-1]["counts"]["clipped"] == sum(line["clipped"] for line in lines)


@pytest.mark.parametrize(
    ("before", "after"), [([1], []), ([2], []), ([], [4]), ([6], []), ([7], [10]), ([3, 5, 9], [12])]
)
@pytest.mark.parametrize("part_bytes", [2**26, 2000], ids=["one part", "parts"])
def test_each_step_has_one_line_after_kills(execute, tmp_path, whole, before, after, part_bytes):
    KillAt.before_steps, KillAt.after_steps = set(before), set(after)
    made = {"checkpoint_steps": 3, "telemetry_bytes": part_bytes}
    for _ in (*before, *after):
        with pytest.raises(Killed):
            execute(config(**made), tmp_path)
    execute(config(**made), tmp_path)
    lines = checked(job(tmp_path))
    assert without_clock(lines) == without_clock(read_telemetry(job(whole)))
    assert [line["window"]["loss"] for line in lines] == [line["window"]["loss"] for line in read_telemetry(job(whole))]
    assert bool(list(job(tmp_path).glob("telemetry-0*.jsonl"))) == (part_bytes == 2000)


def test_a_finished_task_run_again_adds_no_line(execute, tmp_path):
    execute(config(), tmp_path)
    before = (job(tmp_path) / "telemetry.jsonl").read_bytes()
    execute(config(), tmp_path)
    assert (job(tmp_path) / "telemetry.jsonl").read_bytes() == before


@pytest.mark.parametrize("kind", ["a folder in its place", "a full disk"])
def test_training_goes_on_without_telemetry(execute, tmp_path, whole, kind, monkeypatch, caplog):
    if kind == "a folder in its place":
        for name in ("telemetry.jsonl", "alerts.jsonl"):
            (job(tmp_path) / name).mkdir(parents=True)
    else:

        def full(descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(jsonl.os, "write", full)
    execute(config(alerts=Alerts.C(step_seconds=1e-9)), tmp_path)
    monkeypatch.undo()
    said = "was set aside as damaged-{}-0" if kind == "a folder in its place" else "{} cannot be written"
    assert caplog.text.count(said.format("telemetry.jsonl")) == 1
    assert caplog.text.count(said.format("alerts.jsonl")) == 1
    ours, theirs = weights(tmp_path), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_memory_is_predicted_where_it_was_measured(execute, tmp_path, whole):
    assert {line["memory"]["predicted"] for line in read_telemetry(job(whole))} == {None}
    execute(config(batcher=UFormBatcher.C(memory=1_000_000)), tmp_path)
    lines = checked(job(tmp_path))
    assert all(0 < line["memory"]["predicted"] <= 1_000_000 for line in lines)
    assert all(line["memory"]["peak"] > 1_000_000 for line in lines)


def test_a_damaged_checkpoint_is_an_alert(execute, tmp_path):
    KillAt.before_steps, KillAt.after_steps = {7}, set()
    with pytest.raises(Killed):
        execute(config(checkpoint_steps=1), tmp_path)
    damaged = job(tmp_path) / "checkpoints" / "step-00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    execute(config(checkpoint_steps=1), tmp_path)
    lines, (alert,) = checked(job(tmp_path)), read_alerts(job(tmp_path))
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert "step-00000006" in alert["message"]
    assert (alert["step"], alert["value"], alert["threshold"]) == (5, None, None)
    # A finished run keeps it, and so does another one.
    execute(config(checkpoint_steps=1), tmp_path)
    assert list(read_alerts(job(tmp_path))) == [alert]


@pytest.mark.parametrize(("name", "wrong"), [("window", 0), ("telemetry_bytes", 0), ("max_skipped", 0)])
def test_impossible_settings_are_refused(name, wrong):
    with pytest.raises(ValueError, match=f"{name} is {wrong}, expected at least 1"):
        validate(config(**{name: wrong}))
    with pytest.raises(ValueError, match=r"clip_norm is -1\.0, expected 0"):
        validate(config(clip_norm=-1.0))


# --- Two ranks


def test_of_two_ranks_one_writes_and_a_resume_by_one_goes_on(execute, tmp_path, whole):
    KillAt.before_steps, KillAt.after_steps = {6}, set()
    with pytest.raises(Killed):
        execute(config(checkpoint_steps=1), tmp_path)
    run_ranks(2, lambda rank, folder: run_here(config(devices=2), folder), tmp_path)
    lines = checked(job(tmp_path))
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["losses"]["contrastive"] for line in lines] == pytest.approx(
        [line["losses"]["contrastive"] for line in read_telemetry(job(whole))], rel=1e-4
    )
    assert {line["items"] for line in lines} == {8}
