"""Alerts: each condition, once per episode, and the same after a resume."""

import math
from types import SimpleNamespace

import pytest

from xpmir_uform import Alerts
from xpmir_uform.base.configuration import validate
from xpmir_uform.learner.context import UFormContext
from xpmir_uform.monitoring.alerts import NAMES, AlertLog, Finding, Monitor
from xpmir_uform.monitoring.telemetry import Window, read_alerts

WINDOW = 4
OFF = {"nan": False, "inf": False, "skipped": 0, "lacking": 0, "wait_share": 0.0, "divergence": 0.0}


class Lines:
    """Lines of telemetry, as far as alerts read them."""

    def __init__(self):
        self.counts = {"nan": 0, "inf": 0, "skipped": 0, "clipped": 0}
        self.window = Window(WINDOW)
        self.step = 0

    def next(self, loss=1.0, nan=False, inf=False, norm=1.0, seconds=1.0, wait=0.0, rate=0.1, lacking=None):
        self.step += 1
        skipped = nan or inf
        for name, value in (("nan", nan), ("inf", inf), ("skipped", skipped)):
            self.counts[name] += value
        line = {
            "step": self.step,
            "loss": math.nan if nan else loss,
            "skipped": skipped,
            "counts": dict(self.counts),
            "gradient_norm": {"before": norm},
            "learning_rate": {"1/1": rate / 2, "2/1": rate},
            "seconds": {"step": seconds, "wait": wait},
            "items": 2,
            "tokens": 3,
            "lacking": lacking or {},
        }
        return {**line, "window": self.window.add(line)}


def raised(steps, **alerts):
    """By step, the names of the alerts that are raised there."""
    made, monitor = Lines(), Monitor(Alerts.C(**{**OFF, **alerts}).instance(), WINDOW)
    return {line["step"]: names for line in (made.next(**one) for one in steps) if (names := told(monitor, line))}


def told(monitor, line):
    return [finding.name for finding in monitor.observe(line)]


FINE, BAD, ENDLESS = {}, {"nan": True}, {"inf": True}


def test_a_nan_is_told_once_per_episode():
    assert raised([FINE, BAD, BAD, FINE, BAD], nan=True) == {2: ["nan"], 5: ["nan"]}


def test_an_infinity_and_a_nan_are_told_apart():
    assert raised([BAD, ENDLESS, {"nan": True, "inf": True}], nan=True, inf=True) == {
        1: ["nan"],
        2: ["inf"],
        3: ["nan"],
    }


def test_skips_are_told_when_they_are_so_many_in_a_row():
    assert raised([BAD, BAD, FINE, BAD, BAD, BAD, BAD, FINE, BAD, BAD, BAD], skipped=3) == {
        6: ["skipped"],
        11: ["skipped"],
    }


def test_what_a_loss_lacks_is_told_once_it_lacks_it_so_many_times_in_a_row():
    none = {"lacking": {"a": "edges"}}
    assert raised([none, FINE, none, none, none, FINE, none, none], lacking=2) == {4: ["lacking"], 8: ["lacking"]}
    assert raised([FINE, none, none], lacking=1) == {2: ["lacking"]}
    both = Lines().next(lacking={"a": "edges", "b": "choices and places"})
    (finding,) = Monitor(Alerts.C().instance(), WINDOW).observe(both)
    assert finding.message.startswith("in the whole batch a lacks edges; b lacks choices and places")


@pytest.mark.parametrize(
    ("name", "field"), [("gradient_norm", "norm"), ("step_seconds", "seconds"), ("learning_rate", "rate")]
)
def test_a_value_above_its_threshold(name, field):
    values = [1.0, 3.0, 4.0, 2.0, 2.5, 2.0]
    assert raised([{field: value} for value in values], **{name: 2.0}) == {2: [name], 5: [name]}
    assert raised([{field: value} for value in values]) == {}


def test_a_skipped_step_has_no_norm_to_tell_of():
    assert raised([{"nan": True, "norm": math.inf}], gradient_norm=1.0) == {}


def test_waiting_is_a_share_of_a_full_window():
    steps = [{"wait": 9.0}] * 3 + [{"wait": 0.0}] + [{"wait": 0.0}] * 4
    assert raised(steps, wait_share=0.5) == {4: ["wait"]}


def test_divergence_is_a_multiple_of_the_lowest_window():
    steps = [{"loss": loss} for loss in [4.0] * 4 + [1.0] * 4 + [2.9] * 4 + [3.5] * 4]
    assert raised(steps, divergence=3.0) == {13: ["divergence"]}


def test_a_loss_that_never_was_positive_does_not_diverge():
    assert raised([{"loss": loss} for loss in [-4.0] * 4 + [9.0] * 4], divergence=3.0) == {}


def test_a_window_that_is_not_finite_neither_diverges_nor_stands_still():
    steps = [{"loss": 1.0}] * 5 + [BAD] + [{"loss": 1.0}] * 3
    assert raised(steps, divergence=3.0, plateau_steps=4) == {}


def test_a_plateau_ends_when_the_loss_falls_again():
    falling = [{"loss": 10.0 - number} for number in range(8)]
    assert raised([*falling, *[{"loss": 2.0}] * 8, *[{"loss": 1.0}] * 12], plateau_steps=3) == {
        15: ["plateau"],
        23: ["plateau"],
    }
    assert raised(falling, plateau_steps=3) == {}


def test_everything_is_silent_in_a_run_without_faults():
    thresholds = {
        "gradient_norm": 2.0,
        "step_seconds": 2.0,
        "learning_rate": 1.0,
        "wait_share": 0.5,
        "plateau_steps": 5,
    }
    steps = [{"loss": 4.0 - number / 10} for number in range(30)]
    assert raised(steps, nan=True, inf=True, skipped=1, divergence=3.0, **thresholds) == {}


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_resumed_run_tells_the_same(cut):
    """Interrupted after any step, in the middle of any episode."""
    steps = [{"loss": float(loss), "norm": norm, "nan": nan} for loss, norm, nan in zip(
        [9, 8, 7, 6, 5, 4, 4, 4, 4, 4, 4, 4, 9, 40, 40, 40, 40, 1, 1, 1, 1, 1, 1, 1],
        [1, 3, 3, 1, 3, 1, 1, 1, 1, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0], strict=True)]  # fmt: skip
    alerts = Alerts.C(gradient_norm=2.0, plateau_steps=3, skipped=2).instance()
    made = Lines()
    lines = [made.next(**one) for one in steps]
    whole = Monitor(alerts, WINDOW)
    expected = [told(whole, line) for line in lines]
    assert {name for names in expected for name in names} >= {
        "nan",
        "gradient_norm",
        "skipped",
        "plateau",
        "divergence",
    }
    resumed = Monitor(alerts, WINDOW)
    resumed.recall(lines[max(0, cut - resumed.memory) : cut])
    assert [told(resumed, line) for line in lines[cut:]] == expected[cut:]


class Recorder:
    """Keeps what is logged."""

    def __init__(self):
        self.logged = []

    def log_scalar(self, tag, value, step):
        self.logged.append((tag, value, step))


def test_an_alert_goes_to_the_log_to_tensorboard_and_to_its_file(tmp_path, caplog):
    log, recorder = AlertLog(tmp_path / "alerts.jsonl"), Recorder()
    log.add(Finding("gradient_norm", 3.0, 2.0, "too long"), 7, 2, recorder)
    assert "alert gradient_norm at step 7: too long" in caplog.text
    assert recorder.logged == [("alerts/gradient_norm", 3.0, 7)]
    (entry,) = read_alerts(tmp_path)
    assert entry.pop("time") > 0
    assert entry == {
        "name": "gradient_norm", "value": 3.0, "threshold": 2.0, "message": "too long", "step": 7, "epoch": 2,
    }  # fmt: skip


def test_a_resumed_run_drops_what_later_steps_raised_and_nothing_else(tmp_path):
    log, recorder = AlertLog(tmp_path / "alerts.jsonl"), Recorder()
    log.add(Finding("nan", 1.0, 0.0, "kept"), 3, 1, recorder)
    log.add(Finding("nan", 2.0, 0.0, "dropped"), 9, 1, recorder)
    log.add(Finding("checkpoint", None, None, "of another kind"), 9, 1, recorder)
    log.rewind(5)
    log.add(Finding("nan", 2.0, 0.0, "again"), 9, 1, recorder)
    assert [entry["message"] for entry in read_alerts(tmp_path)] == ["kept", "of another kind", "again"]


def test_which_alerts_end_the_task():
    assert not any(Alerts.C().instance().fails(name) for name in NAMES)
    assert [name for name in NAMES if Alerts.C(fail_on_alert=["inf", "wait"]).instance().fails(name)] == ["inf", "wait"]
    assert all(Alerts.C(fail_on_alert=["all"]).instance().fails(name) for name in NAMES)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fail_on_alert": ["loss"]}, "fail_on_alert has loss, expected some of nan, inf"),
        ({"gradient_norm": -1.0}, "gradient_norm is -1.0, expected 0"),
        ({"wait_share": 2.0}, r"wait_share is 2.0, expected 0 \(off\) to 1"),
    ],
)
def test_impossible_thresholds_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        validate(Alerts.C(**wrong))


@pytest.mark.parametrize(("free", "told"), [(9, True), (10, False)])
def test_a_checkpoint_that_would_not_fit_is_told_of_before_its_steps(tmp_path, monkeypatch, free, told):
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    alerts = []
    context = SimpleNamespace(path=tmp_path, alert=lambda *alert: alerts.append(alert))
    UFormContext._look_ahead(context, tmp_path)
    assert [name for name, _ in alerts] == ["full disk"] * told
    assert all("takes about 10 bytes, and 9 are free" in message for _, message in alerts)
