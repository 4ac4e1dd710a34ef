"""Modules that have moved: their earlier paths go on for one release, with a warning.

Both paths are one module object, so that classes, pickles and names in records (`package.module:name`) are the same.
"""

import importlib
import importlib.abc
import pkgutil
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "marlhf_lite"
# Earlier path -> today's, both below the package; submodules go with their package.
MOVED: dict[str, str] = {
    "evaluation.judge_answers": "extras.judges.answers",
    "evaluation.judge_prompts": "extras.judges.prompts",
    "evaluation.judges": "extras.judges.judges",
    "evaluation.judgments": "extras.judges.judgments",
    "models.memory": "extras.memory.estimate",
    "models.memory_report": "extras.memory.report",
    "parsing.link_grammar": "extras.parsers.link_grammar",
    "parsing.python_code": "extras.parsers.python_code",
    "parsing.registry": "macro.catalogue",
    "parsing.stanza": "extras.parsers.stanza",
    "tasks.programs": "extras.programs",
    "training.dpo": "extras.baselines.dpo",
    "training.outputs": "training.experience",
    "training.program_tests": "extras.programs.rewards",
    "training.rloo_grpo": "extras.baselines.rloo_grpo",
    "training.vllm_rollouts": "extras.vllm.rollouts",
    # Paths that texts and lessons named before.
    "errors": "utils.errors",
    "evaluation.agreement": "lab.figures.agreement",
    "evaluation.answers": "evaluation.responses",
    "evaluation.case_study": "lab.figures.case_study",
    "evaluation.chain": "lab.credit.chain_mdp",
    "evaluation.checkpoints": "evaluation.responses",
    "evaluation.gradients": "lab.credit.gradients",
    "evaluation.samples": "evaluation.responses",
    "experiments.chain_mdp": "lab.credit.chain_mdp",
    "experiments.diagnosis": "lab.credit.diagnosis",
    "experiments.learning": "lab.studies.learning",
    "experiments.results": "lab.studies.results",
    "experiments.study": "lab.studies.study",
    "experiments.workspace": "experiments.context",
    "explorer": "lab.figures.explorer",
    "judging_widget": "lab.figures.judging",
    "lab.corpora.tiny_umbrella": "tasks.tiny_umbrella.stories",
    "logprobs": "models.logprobs",
    "macro.signal_kept": "lab.credit.signal_kept",
    "memory": "extras.memory.estimate",
    "notebook": "lab.figures.notebook",
    "options": "config.parser",
    "plotting.case_study": "lab.figures.case_study",
    "plotting.explorer": "lab.figures.explorer",
    "plotting.judging": "lab.figures.judging",
    "plotting.macro_actions": "lab.figures.macro_actions",
    "plotting.notebook": "lab.figures.notebook",
    "plotting.programs": "lab.figures.programs",
    "plotting.reward_model": "lab.figures.reward_model",
    "plotting.trees": "lab.figures.trees",
    "programs": "extras.programs",
    "records": "utils.run_folder",
    "reward_plots": "lab.figures.reward_model",
    "rewards": "training.rewards",
    "roles": "models.actor_critic",
    "rollouts": "training.rollout",
    "rules": "macro.catalogue",
    "spans": "lab.figures.macro_actions",
    "study": "lab.studies.study",
    "study_table": "lab.studies.results",
    "tasks.gold": "tasks.tiny_tldr.gold",
    "tasks.hub": "tasks.paper_datasets",
    "tasks.split": "tasks.splits",
    "tasks.tiny_tldr.corpus": "lab.corpora.tiny_tldr",
    "tasks.tiny_umbrella.corpus": "tasks.tiny_umbrella.stories",
    "tokens": "tasks.tokenization",
    "training.step": "training.objective",
    "tree_views": "lab.figures.trees",
    "workspace": "experiments.context",
}
# Names that have left a module which is still there -> where they are.
MOVED_NAMES: dict[str, str] = {
    "parsing.LinkGrammarParser": "extras.parsers.link_grammar.LinkGrammarParser",
    "parsing.PythonParser": "extras.parsers.python_code.PythonParser",
    "parsing.StanzaParser": "extras.parsers.stanza.StanzaParser",
    "training.experience.OldOutputs": "training.experience.Experience",
}


def moved_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that names have left; `module` is its path."""

    def lookup(name: str) -> Any:
        target = MOVED_NAMES.get(f"{module.removeprefix(f'{PACKAGE}.')}.{name}")
        if target is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{PACKAGE}.{target}", stacklevel=2)
        return pkgutil.resolve_name(f"{PACKAGE}.{target}")

    return lookup


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds today's module behind an earlier path."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _today(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system; `exec_module` puts today's module in its place."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _warn(name, _today(name), stacklevel=2)
        sys.modules[name] = importlib.import_module(_today(name))


def install() -> None:
    """Make earlier paths importable; the package does so once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())


def _today(fullname: str) -> str:
    """Today's path of a module that has moved, or of one in a package that has; empty for all others."""
    package, _, path = fullname.partition(".")
    if package != PACKAGE:
        return ""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if new := MOVED.get(".".join(parts[:count])):
            return ".".join([PACKAGE, new, *parts[count:]])
    return ""


def _warn(old: str, new: str, stacklevel: int) -> None:
    """Warn at the user's import. The frames of the import system do not count."""
    warnings.warn(f"{old} is now {new}: its former name ends with the next release", DeprecationWarning, stacklevel + 1)
