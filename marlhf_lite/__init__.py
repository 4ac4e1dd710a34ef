"""RLHF with macro actions (MA-RLHF, arXiv 2410.02743). Which idea of the paper is where, in the paper's order:

    section 2.2     SFT, reward model, KL-shaped reward     training.sft, training.reward_model, macro.kl_rewards
    section 3.1     macro actions                           macro.MacroActions
    section 3.2.1   termination conditions                  macro.FixedNGram and others; names: experiments.named_rules
    section 3.2.2   macro rewards, values, objective        macro.macro_rewards, macro_values, policy_loss
    section 3.2.3   n = 1 is PPO, n = inf a bandit          macro.FixedNGram(1), macro.Whole()
    section 4.1     tasks and data                          tasks
    Appendix B.2    data split, what starts from what       tasks.splits, models.loading.build_models
    Appendix B.5    programs, their tests and reward        extras.programs, extras.programs.rewards
    Table 3         pass@k                                  evaluation.pass_at_k
    Appendix D.1    value of a macro action, sigma          macro.macro_values
    Appendix E      Algorithm 1, losses                     training.ppo, macro.policy_loss, macro.value_loss
    section 4.1, F  pairwise judges, people                 extras.judges.judges, marlhf_lab.figures.judging
    Table 1         agreement                               marlhf_lab.figures.agreement
    Table 5, C.4    every setting                           config/presets, listed by `marlhf presets`
    Table 7         DPO, RLOO (and GRPO)                    extras.baselines.dpo, extras.baselines.rloo_grpo
    Figure 8, 21    best-of-N, temperatures                 evaluation.best_of_n
    figures         2, 3, 11 and their kin                  plotting.training, plotting.evaluation

Data walks one way: text -> tokens -> rollout -> macro actions -> rewards, values -> advantages -> losses -> update ->
records -> figures.
"""

import logging

__version__ = "1.1.0"

# Where it is installed, bitsandbytes warns at its import of a kernel for CPUs that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
