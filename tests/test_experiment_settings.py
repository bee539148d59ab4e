"""Settings from YAML and -c, as experimaestro's command reads them: nothing is passed over in silence."""

import inspect
import logging
import re
from types import SimpleNamespace
from typing import Any

import click
import pytest
from experimaestro.experiments import configuration
from experimaestro.utils.config import validate_attrs

from xpmir_uform.recipes import ExperimentSettings, ModelSettings, Seeds, TrainingSettings, UFormExperiment
from xpmir_uform.recipes.reading import read_settings


@configuration
class Plan(ExperimentSettings):
    """Settings of all kinds."""

    seeds: Seeds
    form: str = "ranked"
    rate: float | None = None
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    stages: list[TrainingSettings] | None = None
    named: dict[str, ModelSettings] | None = None
    other: ModelSettings | None = None


def read(**data: Any) -> Plan:
    return read_settings(Plan, {"id": "plan", "seeds": [1], **data})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sead": [3]}, "sead is no setting: did you mean seeds?"),
        (
            {"training": {"learning_rte": 1}},
            "training.learning_rte is no setting: did you mean training.learning_rate?",
        ),
        ({"epochs": 3}, "epochs is no setting here: did you mean training.epochs?"),
        ({"model": {"xyz": 1}}, "model.xyz is no setting, expected some of depth, hidden, width, "),
        ({"stages": [{}, {"epoch": 1}]}, "stages.1.epoch is no setting: did you mean stages.1.epochs?"),
        ({"named": {"a": {"dept": 1}}}, "named.a.dept is no setting: did you mean named.a.depth?"),
        ({"other": {"dept": 1}}, "other.dept is no setting: did you mean other.depth?"),
        ({"max_retry": 1}, "max_retry is no setting: did you mean max_retries?"),
        ({"model": 3}, "model is 3, expected a section with some of depth, "),
        ({"model": None}, "model is None, expected a section"),
        ({"seeds": ["x"]}, "seeds is ['x']: Input should be a valid integer"),
        ({"seeds": []}, "seeds is []: List should have at least 1 item"),
        ({"training": {"epochs": 1.5}}, "training.epochs is 1.5: Input should be a valid integer"),
        ({"training": {"epochs": True}}, "training.epochs is True, expected a number"),
        ({"dirty_git": "never"}, "dirty_git is 'never': Input should be 'ignore', 'warn' or 'error'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_near(data, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read(**data)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["id", "seeds"])
def test_a_required_setting_that_is_missing_is_named(name):
    data = {"id": "plan", "seeds": [1]}
    del data[name]
    with pytest.raises(ValueError, match=f"^{name} is missing"):
        read_settings(Plan, data)


def test_what_is_right_is_read():
    made = read(
        rate="2e-3", training={"devices": 1, "epochs": "4"}, named={"a": {"depth": 3}}, stages=[{}], other={"width": 8}
    )
    assert (made.rate, made.training.devices, made.training.epochs, made.seeds) == (2e-3, "1", 4, [1])
    assert (made.named["a"].depth, made.stages, made.other.width) == (3, [TrainingSettings()], 8)
    assert (made.model, made.form, made.max_retries, made.verbose) == (ModelSettings(), "ranked", 3, False)
    assert read(rate=None).rate is None


def command_reads(plan, data):
    """What experimaestro's command does before it begins."""
    made = UFormExperiment(plan)
    schema = list(inspect.signature(made.callable).parameters.values())[1].annotation
    return made, validate_attrs(schema, data)


@pytest.fixture
def quiet_root(monkeypatch):
    """The root logger as it was."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


@pytest.mark.usefixtures("quiet_root")
def test_the_command_reads_by_it():
    def run(helper, settings: "Plan"):
        return settings

    run.__annotations__["settings"] = Plan
    made, settings = command_reads(run, {"id": "plan", "seeds": ["7"], "max_retries": 9})
    assert isinstance(settings, Plan)
    assert (settings.seeds, made.max_retries) == ([7], 9)
    assert made.callable(made, settings) is settings


@pytest.mark.usefixtures("quiet_root")
def test_the_command_ends_with_one_line():
    def run(helper, settings: Plan):
        """Is not reached."""

    with pytest.raises(SystemExit) as raised:
        command_reads(run, {"id": "plan", "seeds": [7], "fom": "balanced"})
    assert raised.value.code == "Refused: fom is no setting: did you mean form?"


@pytest.mark.usefixtures("quiet_root")
def test_the_command_refuses_what_every_plan_may_set(tmp_path, monkeypatch):
    def run(helper, settings: Plan):
        """Is not reached."""

    with pytest.raises(SystemExit) as raised:
        command_reads(run, {"id": "plan", "seeds": [7], "max_retries": -2})
    assert raised.value.code == "Refused: max_retries is -2, expected at least 0"
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    command = click.Command("run", params=[click.Option(["--workdir"])])
    with command.make_context("run", ["--workdir", str(tmp_path / "new")]), pytest.raises(SystemExit) as raised:
        command_reads(run, {"id": "plan", "seeds": [7]})
    assert re.fullmatch("Refused: the file system .* is full: 0 bytes are free. .*", raised.value.code)
