"""The loop around updates by itself: it needs no model, only an update to call."""

import pytest
from accelerate import Accelerator

from marlhf_lite.config.options import PPOTrainerConfig
from marlhf_lite.training.best_update import BestUpdate
from marlhf_lite.training.logging import RunLogger
from marlhf_lite.training.loop import TrainingLoop
from marlhf_lite.training.run_state import BatchSize, RunState
from marlhf_lite.utils.errors import InputError, ServerError


class Counted:
    """A loop of five updates that do nothing but count; what it does between them is noted."""

    def __init__(self, kl=(), **options):
        self.saved, self.tested, self.prompts = [], [], []
        self.kl = dict(enumerate(kl, start=1))
        self.state = RunState(
            micro_batch=BatchSize(asked=4, now=4),
            generation_batch=BatchSize(asked=0, now=0),
            gradient_checkpointing=False,
        )
        self.loop = TrainingLoop(
            config=PPOTrainerConfig(updates=5, batch_size=2, **options),
            prompts=["a", "b", "c"],
            state=self.state,
            total_updates=5,
            logger=RunLogger(None),
            accelerator=Accelerator(),
            best=BestUpdate(
                score_name=options.get("keep_best", ""),
                patience=options.get("patience", 0),
                state=self.state,
            ),
            save_checkpoint=lambda: self.saved.append(self.state.updates_done),
            test_held_out=self.test,
        )

    def test(self):
        self.tested.append(self.state.updates_done)
        return {"kl_k3": 0.0}

    def update(self, prompts):
        self.prompts.append(prompts)
        self.state.updates_done += 1
        done = self.state.updates_done
        return {"update": done, "skipped_steps": 0.0, "kl_k1": self.kl.get(done, 0.0)}


def test_checkpoints_and_tests_are_made_every_so_often_and_at_the_end():
    made = Counted(checkpoint_every=2, eval_every=3)
    made.loop.run(made.update, lambda: False)
    assert made.saved == [2, 4, 5] and made.tested == [3, 5]


def test_it_stops_when_asked_with_a_checkpoint_and_goes_on_with_the_next_prompts():
    whole = Counted(checkpoint_every=10)
    whole.loop.run(whole.update, lambda: False)
    made = Counted(checkpoint_every=10)
    made.loop.run(made.update, lambda: made.state.updates_done == 2)
    assert made.saved == [2]
    made.loop.run(made.update, lambda: False)
    assert made.saved == [2, 5] and made.prompts == whole.prompts


def test_it_stops_beyond_the_ceiling_of_the_kl(capsys):
    made = Counted(kl=(1.0, 9.0), kl_ceiling=5.0, checkpoint_every=10, eval_every=10)
    made.loop.run(made.update, lambda: False)
    assert made.saved == made.tested == [2]
    assert "stopped at update 2: KL 9.0 is beyond --kl_ceiling 5" in "".join(capsys.readouterr())


def test_a_server_that_fails_leaves_a_checkpoint_to_continue_from():
    def failing(prompts):
        raise ServerError("it is down")

    made = Counted(checkpoint_every=10)
    with pytest.raises(InputError, match="update 1: it is down; --resume continues from here"):
        made.loop.run(failing, lambda: False)
    assert made.saved == [0]
