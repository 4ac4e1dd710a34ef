"""Trackers through accelerate: what TensorBoard and Weights & Biases are given can be read again."""

import importlib.util
import json

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import fails
from small_runs import build
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from marlhf_lite.training.trackers import TRACKERS, make_accelerator, tracker_names
from marlhf_lite.utils.run_folder import RunFolder

CONFIG = {
    "seed": 3,
    "kl_coef": 0.05,
    "whiten": False,
    "model": "tiny",
    "size": None,
    "environment": {"torch": "2"},
}


@pytest.fixture
def train(roles, tokenizer, tmp_path):
    """Two updates, the second one tested, logged to these trackers; the run and its history."""

    def go(names):
        run = RunFolder.create(tmp_path / "run", {})
        accelerator = make_accelerator(names, run.path, "MA-PPO", CONFIG)
        changes = {"eval_every": 2, "test_prompts": ["b"], "updates": 2, "length": 3}
        trainer = build(roles, tokenizer, run, accelerator=accelerator, **changes)
        try:
            trainer.train()
        finally:
            accelerator.end_training()
        return run

    return go


def test_tensorboard_holds_every_metric(train):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train("tensorboard")
    seen = {}
    for folder in {path.parent for path in (run.path / "trackers").rglob("events.*")}:
        events = reader.EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            seen[tag] = {event.step: event.value for event in events.Scalars(tag)}
    for row in run.metrics():
        for name in row.keys() - {"update"}:
            assert seen[name][row["update"]] == pytest.approx(row[name], rel=1e-5, abs=1e-7), name
    [test] = run.tests()
    for name in test.keys() - {"update"}:
        assert seen[f"test/{name}"] == {2: pytest.approx(test[name])}


def test_wandb_writes_into_the_run(train, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for place in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place))
    run = train("wandb")
    wandb.teardown()  # its service writes the file, and ends here
    [path] = run.path.glob("wandb/offline-run-*/run-*.wandb")
    row, text = run.metrics()[-1], path.read_bytes()
    for name in ("score_mean", "kl_k1", "test/score_win_rate", "kl_coef", "tiny"):
        assert name.encode() in text
    assert json.dumps(row["score_mean"]).encode()[:8] in text and b"environment" not in text


def test_what_accelerate_knows_goes_by_name(monkeypatch):
    known = {name: cls for name, cls in LOGGER_TYPE_TO_CLASS.items() if name != "aim"}
    assert set(TRACKERS) == set(known) <= set(INTEGRATION_TO_CALLBACK) and {
        "trackio",
        "swanlab",
        "mlflow",
    } <= set(known)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda word: None if word == "comet_ml" else object()
    )
    assert tracker_names("trackio, mlflow") == ["trackio", "mlflow"]
    fails(
        lambda: tracker_names("comet_ml"),
        "--report_to comet_ml: the package is missing: pip install comet-ml",
    )
    fails(lambda: tracker_names("aim"), "--report_to aim: unknown: choose from clearml, ")
