"""Figures of the chain with known truth (`credit.chain_mdp`), for notebooks 02 and 04. Each returns its Axes."""

import math
from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

from marlhf_lite.plotting.styles import method_styles

# kind -> the method whose colour and line it has, its name in the figures
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
        signals: {(kind, n): (mean [K], half the width of its interval [K])}; a kind is "macro" or "control".
    """
    _, axes = plt.subplots(1, 2, figsize=(7.4, 3), sharey=True)
    for ax, (kind, (_, title)) in zip(axes, KINDS.items(), strict=True):
        of_kind = {n: signal for (name, n), signal in signals.items() if name == kind}
        # There are markers and greys for up to five n.
        for (n, (mean, half)), marker, grey in zip(of_kind.items(), "os^vD", GREYS, strict=False):
            label = f"n = {INFINITE.get(n, n)}"
            ax.errorbar(far, mean, half, marker=marker, markersize=4, color=grey, label=label)
        ax.set(xlabel="tokens to the score", title=title)
    axes[0].set_ylabel("signal kept (1 = all)")
    _legend_above(axes[0], columns=len(of_kind))
    return axes[0]


def cosines_by_critic(
    critics: Sequence[str], sizes: Sequence[float], cosines: Mapping[tuple, Tensor]
) -> Axes:
    """Draw the cosine of a batch's gradient with the true one by n, a panel for each critic.

    Args:
        critics, sizes: names of the critics, and the n of the macro actions.
        cosines: {(critic, kind, n): [seeds]}; a kind is "macro" or "control".
    """
    _, axes = plt.subplots(1, len(critics), figsize=(7.6, 3.2), sharey=True)
    for ax, critic in zip(axes, critics, strict=True):
        # The two kinds stand a little left and right of each n, so that their bars do not cover each other.
        for shift, (kind, (method, label)) in zip((-0.08, 0.08), KINDS.items(), strict=True):
            of_sizes = [cosines[critic, kind, n] for n in sizes]
            ax.errorbar(
                [place + shift for place in range(len(sizes))],
                [of_seeds.mean() for of_seeds in of_sizes],
                # half of a 95 % interval over seeds
                [1.96 * of_seeds.std() / math.sqrt(len(of_seeds)) for of_seeds in of_sizes],
                marker="o",
                markersize=4,
                label=label,
                **method_styles([method])[method],
            )
        ax.set(title=critic.replace(", ", ",\n"), xlabel="n", ylim=(0, 1))
        ax.set_xticks(range(len(sizes)), [str(INFINITE.get(n, n)) for n in sizes])
    axes[0].set_ylabel("cosine with the true gradient")
    _legend_above(axes[0], columns=2)
    return axes[0]


def credit_by_place(shares: Mapping[str, Mapping[str, tuple]]) -> Axes:
    """Draw the share of a token's credit that each σ leaves, by place in the macro action, a panel for each critic.

    Lines are the expected shares; marks are the measured ones, with 95 % intervals.

    Args:
        shares: {title of the critic: {σ: (expected [n], measured [n], standard error [n])}}.
    """
    _, axes = plt.subplots(1, len(shares), figsize=(7.2, 3.2), sharey=True)
    for ax, (title, rows) in zip(axes, shares.items(), strict=True):
        for (sigma, (expected, mean, error)), marker in zip(rows.items(), "osv^D", strict=False):
            method = f"sigma {sigma}"
            colour = method_styles([method])[method]["color"]
            ax.plot(range(len(expected)), expected, color=colour)
            ax.errorbar(
                range(len(mean)),
                mean,
                1.96 * error,
                fmt=marker,
                color=colour,
                markersize=4,
                label=sigma,
            )
        ax.set(xlabel="place i in the macro action", title=title, xticks=range(len(mean)))
    axes[0].set_ylabel("share of the credit that is left")
    _legend_above(axes[0], columns=5)
    return axes[0]


def _legend_above(ax: Axes, columns: int) -> None:
    """Put the legend of one panel above the whole figure, for all of its panels."""
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def norms_by_n(
    sizes: Sequence[int], norms: Mapping[str, Sequence[float]], rms: Mapping[str, Sequence[float]]
) -> Axes:
    """Draw L2 norms (left) and root mean squares (right) of advantages and returns by n.

    Args:
        sizes: [N] the values of n; the first is 1.
        norms, rms: {"Â": [N], "Q̂": [N]}.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2))
    for name, marker, line in (("Â", "o", "-"), ("Q̂", "s", "--")):
        left.loglog(sizes, norms[name], label=f"norm of {name}", marker=marker, linestyle=line)
        right.semilogx(sizes, rms[name], label=f"RMS of {name}", marker=marker, linestyle=line)
    # What the norm of Â would be if only the number of macro actions changed, which is the number of tokens over n.
    by_count_alone = [norms["Â"][0] / n**0.5 for n in sizes]
    label = "norm of Â at n = 1, over √n"
    left.loglog(sizes, by_count_alone, color="0.4", linestyle=":", label=label)
    left.set(xlabel="n, tokens in a macro action", ylabel="L2 norm per answer")
    left.set_yticks((0.5, 1, 2, 5), ("0.5", "1", "2", "5"))
    right.set(xlabel="n, tokens in a macro action", ylabel="RMS per macro action", ylim=(0, None))
    for ax in (left, right):
        ax.set_xticks(sizes, [str(n) for n in sizes])
        ax.minorticks_off()
        ax.legend()
    return left
