"""Figures of the chain with known truth (`credit.chain_mdp`), for notebooks 02 and 04. Each returns its Axes."""

import math
from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

from marlhf_lite.plotting.styles import method_styles

KINDS = {
    "macro": ("MA-PPO", "macro actions, λ = 0.95"),
    "control": ("PPO lam^(1/n)", "single tokens, λ′ = 0.95^(1/n)"),
}
INFINITE = {math.inf: "∞"}
GREYS = ("0", "0.2", "0.35", "0.5", "0.65")


def signal_by_distance(
    far: Sequence[float], signals: Mapping[tuple, tuple[Tensor, Tensor]]
) -> Axes:
    """Draw the signal that is kept, by distance to the score: macro actions on the left, their control on the right.

    Args:
        far: [K] distances in tokens.
        signals: {(kind, n): (mean [K], half of its interval [K])}, kind "macro" or "control".
    """
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3), sharey=True)
    for ax, (kind, (_, title)) in zip(axes, KINDS.items(), strict=True):
        chosen = {n: pair for (name, n), pair in signals.items() if name == kind}
        for (n, (mean, half)), marker, grey in zip(chosen.items(), "os^vD", GREYS, strict=False):
            look = {
                "marker": marker,
                "markersize": 4,
                "color": grey,
                "label": f"n = {INFINITE.get(n, n)}",
            }
            ax.errorbar(far, mean, half, **look)
        ax.set(xlabel="tokens to the score", title=title)
    axes[0].set_ylabel("signal kept (1 = all)")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(chosen)
    )
    return axes[0]


def cosines_by_critic(
    critics: Sequence[str], sizes: Sequence[float], cosines: Mapping[tuple, Tensor]
) -> Axes:
    """Draw the cosine of a batch's gradient with the true one by n, a panel for each critic.

    Args:
        critics, sizes: names of the critics, and the n of the macro actions.
        cosines: {(critic, kind, n): [seeds]}, kind "macro" or "control".
    """
    figure, axes = plt.subplots(1, len(critics), figsize=(7.6, 3.2), sharey=True)
    for ax, critic in zip(axes, critics, strict=True):
        for shift, (kind, (method, label)) in zip((-0.08, 0.08), KINDS.items(), strict=True):
            means = [cosines[critic, kind, n].mean() for n in sizes]
            bars = [
                1.96 * cosines[critic, kind, n].std() / math.sqrt(len(cosines[critic, kind, n]))
                for n in sizes
            ]
            places = [place + shift for place in range(len(sizes))]
            look = {
                "marker": "o",
                "markersize": 4,
                "label": label,
                **method_styles([method])[method],
            }
            ax.errorbar(places, means, bars, **look)
        ax.set(title=critic.replace(", ", ",\n"), xlabel="n", ylim=(0, 1))
        ax.set_xticks(range(len(sizes)), [str(INFINITE.get(n, n)) for n in sizes])
    axes[0].set_ylabel("cosine with the true gradient")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return axes[0]


def credit_by_place(shares: Mapping[str, Mapping[str, tuple]]) -> Axes:
    """Draw the share of a token's credit that each σ leaves, by place in the macro action, a panel for each critic.

    Args:
        shares: {title of the critic: {σ: (expected [n], measured [n], standard error [n])}}.
    """
    figure, axes = plt.subplots(1, len(shares), figsize=(7.2, 3.2), sharey=True)
    for ax, (title, rows) in zip(axes, shares.items(), strict=True):
        for (sigma, (expected, mean, error)), marker in zip(rows.items(), "osv^D", strict=False):
            colour = method_styles([f"sigma {sigma}"])[f"sigma {sigma}"]["color"]
            ax.plot(range(len(expected)), expected, color=colour)
            look = {"fmt": marker, "color": colour, "markersize": 4, "label": sigma}
            ax.errorbar(range(len(mean)), mean, 1.96 * error, **look)
        ax.set(xlabel="place i in the macro action", title=title, xticks=range(len(mean)))
    axes[0].set_ylabel("share of the credit that is left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return axes[0]


def norms_by_n(
    sizes: Sequence[int], norms: Mapping[str, Sequence[float]], rms: Mapping[str, Sequence[float]]
) -> Axes:
    """Draw L2 norms (left) and root mean squares (right) of advantages and returns by n: {"Â": [N], "Q̂": [N]}."""
    left, right = plt.subplots(1, 2, figsize=(7.2, 3.2))[1]
    for name, marker, style in (("Â", "o", "-"), ("Q̂", "s", "--")):
        look = {"marker": marker, "linestyle": style}
        left.loglog(sizes, norms[name], label=f"norm of {name}", **look)
        right.semilogx(sizes, rms[name], label=f"RMS of {name}", **look)
    counting = [norms["Â"][0] / n**0.5 for n in sizes]
    left.loglog(sizes, counting, color="0.4", linestyle=":", label="norm of Â at n = 1, over √n")
    left.set(xlabel="n, tokens in a macro action", ylabel="L2 norm per answer")
    left.set_yticks((0.5, 1, 2, 5), ("0.5", "1", "2", "5"))
    right.set(xlabel="n, tokens in a macro action", ylabel="RMS per macro action", ylim=(0, None))
    for ax in (left, right):
        ax.set_xticks(sizes, [str(n) for n in sizes])
        ax.minorticks_off()
        ax.legend()
    return left
