"""Earlier names of options and metrics, which older run folders, protocols and results have."""

from collections.abc import Iterable, Mapping

# Option of earlier versions -> what gives the same now.
FORMER = {
    "gae_over": "--objective sae",
    "lam_alpha": "--objective vapo=ALPHA",
    "critic_lam": "--objective vc_ppo=LAMBDA",
    "loss_mean": "--objective released",
}
# Metric of earlier versions -> its name now, which fits a score from a function, too.
METRICS = {f"rm_score_{part}": f"score_{part}" for part in ("mean", "std", "sft", "win_rate")}


def with_todays_metrics(names: Iterable[str]) -> list[str]:
    """Return names of metrics as they are now."""
    return [METRICS.get(name, name) for name in names]


def with_todays_names(options: Mapping) -> dict:
    """Return options by today's names: options that change an equation of PPO are parts of `objective` now."""
    # 1. Names and places that have changed. A mapping `environment` is the record of a run's versions, which is called
    #    `versions` now; a text of this name is the option `--environment`.
    renamed = {}
    for name, value in options.items():
        if name == "environment" and isinstance(value, Mapping):
            name = "versions"
        if isinstance(value, str):  # maybe a function of the laboratory, by its former module
            value = value.replace("marlhf_lite.lab.", "marlhf_lab.")
        renamed[name] = value
    if not FORMER.keys() & renamed.keys():
        return renamed
    # 2. What former options say, as parts of `objective`: name of a part -> the part.
    parts = {}
    if renamed.get("loss_mean") == "response":
        parts["released"] = "released"
    if renamed.get("gae_over") == "tokens":
        parts["sae"] = "sae"
    alpha = float(renamed.get("lam_alpha") or 0)
    if alpha:  # 0 was "no"
        parts["vapo"] = f"vapo={alpha:g}"
    critic_lam = renamed.get("critic_lam")
    if critic_lam is not None:
        # 1 is what vc_ppo has without a number.
        parts["vc_ppo"] = f"vc_ppo={float(critic_lam):g}".removesuffix("=1")
    # 3. If `objective` itself has a part of the same name, this one counts: it is a later layer's own choice.
    for part in str(renamed.get("objective", "")).split(","):
        if part:
            name = part.partition("=")[0]
            parts[name] = part
    todays = {name: value for name, value in renamed.items() if name not in FORMER}
    return todays | {"objective": ",".join(sorted(parts.values()))}
