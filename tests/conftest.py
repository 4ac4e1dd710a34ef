"""A tiny random Gemma with adapters of its own, shared by the tests that need a model."""

import copy
import gc
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib as mpl
import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from matplotlib import pyplot
from small_runs import PROMPTS, build
from transformers import GemmaConfig, GemmaForCausalLM

from marlhf_lab.corpora import make_rows
from marlhf_lite.config.options import ModelConfig
from marlhf_lite.extras.programs import EXECUTORS
from marlhf_lite.models import loading
from marlhf_lite.models.loading import build_models
from marlhf_lite.training.rollout import from_texts
from marlhf_lite.utils.errors import InputError
from marlhf_lite.utils.jsonl import append_lines
from marlhf_lite.utils.run_folder import RunFolder

mpl.use("Agg")  # no window, whatever the machine has
settings.register_profile("slow machines too", deadline=None)
settings.load_profile("slow machines too")

HERE = Path(__file__).resolve().parent
RESPONSES = ["yes it is", "", "no", "a rather long answer, I fear", "ok then", "!"]


def pytest_collection_modifyitems(items):
    """Long tests first: side by side, no process works on one after the others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """Every training begins and ends with a garbage collection: let it pass over what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel as it is installed; built once for all processes of the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "installed"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
            wheel = tmp_path_factory.mktemp("wheel")
            command = [
                *pip,
                "wheel",
                "--no-deps",
                "--no-build-isolation",
                "--wheel-dir",
                str(wheel),
                str(HERE.parent),
            ]
            subprocess.run(command, check=True)
            target = wheel / "target"
            command = [*pip, "install", "--no-deps", "--no-index", "--target", str(target)]
            subprocess.run([*command, *map(str, wheel.glob("*.whl"))], check=True)
            for helper in ("figure_checks.py", "exercise_answers.py"):
                shutil.copy(HERE / helper, target)
            shutil.copytree(HERE / "data", target / "data")
            target.rename(shared)
    return shared


@pytest.fixture(scope="session")
def tokenizer():
    return loading.load_tokenizer(loading.EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def pad_is_eos(tokenizer):
    """A tokenizer whose pad token is its EOS token."""
    other = copy.deepcopy(tokenizer)
    other.pad_token = other.eos_token
    assert (
        other.pad_token_id == other.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    )
    return other


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """A folder with a random two-layer Gemma, and options that name it."""
    folder = tmp_path_factory.mktemp("model") / "gemma"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    config = GemmaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes, **special)
    GemmaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelConfig(model=str(folder), lora_r=4, lora_alpha=8)


@pytest.fixture(scope="session")
def base(tiny):
    return loading.load_base(tiny)


@torch.no_grad()
def nudge(model, seed, size=0.05):
    """Adds noise to every trainable parameter, so that no adapter is the identity; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="session")
def sft(base, tiny, tmp_path_factory):
    """Folder of an SFT adapter."""
    folder = tmp_path_factory.mktemp("sft")
    torch.manual_seed(0)  # the same adapter whatever ran before
    nudge(loading.new_policy(base, tiny), 1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rm(base, sft, tmp_path_factory):
    """Folder of a reward adapter with its head."""
    folder = tmp_path_factory.mktemp("rm")
    torch.manual_seed(0)
    nudge(loading.new_reward_model(base, sft), 2).save_pretrained(folder)
    return folder


@pytest.fixture
def roles(base, sft, rm):
    return build_models(base, sft, rm)


@pytest.fixture
def moved(roles):
    """Roles in the middle of training: the policy is no longer the reference, nor the critic the reward model."""
    nudge(roles.policy, 3, 0.02)
    nudge(roles.critic, 4, 0.02)
    return roles


@pytest.fixture
def fresh(base, sft):
    """A function that loads the SFT adapter once more."""
    return lambda trainable=True: loading.load_policy(base, sft, trainable)


@pytest.fixture
def texts():
    return SimpleNamespace(prompts=list(PROMPTS), responses=list(RESPONSES))


@pytest.fixture
def make(roles, tokenizer):
    """A function that makes a trainer on a few prompts; for its arguments see `small_runs.build`."""
    return lambda run=None, **changes: build(roles, tokenizer, run, **changes)


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {})


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A file of preference pairs of the embedded task."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    append_lines(path, make_rows("tiny-tldr", 80, 0))
    return path


@pytest.fixture
def git(tmp_path):
    """A function that runs git in the test's folder, as somebody with a name; what git prints."""

    def run(*words):
        names = [
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@example.org",
            "-c",
            "init.defaultBranch=main",
        ]
        done = subprocess.run(
            ["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    return run


def ready(name, seconds=1.0):
    """The executor of programs with this time limit, or a skip with the reason why it is not there."""
    try:
        return EXECUTORS[name](seconds)
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(params=list(EXECUTORS))
def executor(request):
    """The name of each executor."""
    ready(request.param)
    return request.param


def fails(run, *parts):
    """Check that `run` raises an `InputError` of one line that has these parts."""
    with pytest.raises(InputError) as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message


def snapshot(module):
    """Copies of all parameters and buffers by name."""
    return {k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}


def changed(module, before):
    """Names of parameters and buffers that are not as they were."""
    return {k for k, v in snapshot(module).items() if not torch.equal(v, before[k])}


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    """What a test drew is not seen by the next one."""
    yield
    pyplot.close("all")


@pytest.fixture
def figures_apart():
    """A test that draws leaves matplotlib's settings as they were."""
    settings = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == settings


@pytest.fixture
def batch(roles, tokenizer, texts):
    """Six scored responses of different lengths; reference log-probabilities from the reference model."""
    rollout = from_texts(tokenizer, texts.prompts, texts.responses, limit=12)
    with torch.no_grad():
        log_p = roles.reference(rollout.tokens, rollout.attention_mask, rollout.mask.shape[1])[0]
    scores = torch.tensor([0.7, -1.2, 4.0, 0.1, -3.0, 0.4])
    return replace(rollout, ref_logprobs=log_p, scores=scores)
