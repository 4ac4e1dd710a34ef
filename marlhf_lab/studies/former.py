"""Earlier names of options and metrics, which older run folders, protocols and results have."""

from collections.abc import Iterable, Mapping

# Option of earlier versions -> what gives the same now.
FORMER = {
    "gae_over": "--objective sae",
    "lam_alpha": "--objective vapo=ALPHA",
    "critic_lam": "--objective vc_ppo=LAMBDA",
    "loss_mean": "--objective released",
}
# Metric of earlier versions -> its name now: a function may have given the score.
METRICS = {f"rm_score_{part}": f"score_{part}" for part in ("mean", "std", "sft", "win_rate")}


def with_todays_metrics(names: Iterable[str]) -> list[str]:
    """Return names of metrics as they are now."""
    return [METRICS.get(name, name) for name in names]


def with_todays_names(options: Mapping) -> dict:
    """Options by today's names: options that change an equation of PPO are part of `objective` now.

    The versions of a run were called `environment` and are `versions` now; `--environment` is an option.
    """
    if isinstance(options.get("environment"), Mapping):
        options = {
            "versions" if name == "environment" else name: value for name, value in options.items()
        }
    options = {
        k: x.replace("marlhf_lite.lab.", "marlhf_lab.") if isinstance(x, str) else x
        for k, x in options.items()
    }
    if not FORMER.keys() & options.keys():
        return dict(options)
    alpha, critic_lam = options.get("lam_alpha"), options.get("critic_lam")
    named = {
        "released": "released" if options.get("loss_mean") == "response" else "",
        "sae": "sae" if options.get("gae_over") == "tokens" else "",
        "vapo": f"vapo={float(alpha):g}" if alpha and float(alpha) else "",
        "vc_ppo": "" if critic_lam is None else f"vc_ppo={float(critic_lam):g}".removesuffix("=1"),
    }
    present = [name for name in str(options.get("objective", "")).split(",") if name]
    for name in present:  # a later layer's own choice
        named.pop(name.partition("=")[0], None)
    objective = ",".join(sorted([*present, *filter(None, named.values())]))
    kept = {name: value for name, value in options.items() if name not in FORMER}
    return kept | {"objective": objective}
