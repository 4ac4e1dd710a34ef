"""Draw the figures of the slides at the size of a slide: `python book/slides/draw.py` writes the PNG files beside it.

Letters are as large as the slides' own text, so that the last row of a lecture room reads the axes. The numbers are
those of the stored studies.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from marlhf_lab.studies.answer import answer_figure
from marlhf_lab.studies.contrasts import curve_of
from marlhf_lab.studies.results import by_method, stored_results
from marlhf_lite.plotting.styles import METHODS

HERE = Path(__file__).resolve().parent
WINDOW = 5  # updates that a point of a curve averages over


def smooth(scores: list[float]) -> np.ndarray:
    """Return the mean of the last `WINDOW` scores at each update, of fewer at the start."""
    means = []
    for end in range(1, len(scores) + 1):
        start = max(0, end - WINDOW)
        means.append(np.mean(scores[start:end]))
    return np.array(means)


def draw_curves(name: str, methods: dict[str, tuple[str, str, float]]) -> None:
    """Draw the mean curve of each method over its seeds, with a band of one standard deviation.

    Args:
        name: of the file.
        methods: for each label the name of its style, its method in the study `umbrella`, and how far above the end
            of its curve the label stands, so that labels of like curves do not overlap.
    """
    runs = by_method(stored_results("umbrella"))
    with plt.rc_context({"font.size": 22, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(12.4, 5.6), layout="constrained")
        for label, (style, method, raised) in methods.items():
            curves = []  # of each seed
            for run in runs[method].values():
                scores = [row["gold_mean"] for row in curve_of(run)]
                curves.append(smooth(scores))
            mean = np.mean(curves, axis=0)
            deviation = np.std(curves, axis=0, ddof=1)
            low = mean - deviation
            high = mean + deviation
            updates = np.arange(1, len(mean) + 1)
            look = METHODS[style]
            axes.plot(updates, mean, color=look.colour, linestyle=look.line, linewidth=4)
            axes.fill_between(updates, low, high, color=look.colour, alpha=0.15)
            end_of_curve = (updates[-1], mean[-1] + raised)
            text = f" {label}"
            axes.annotate(text, end_of_curve, color=look.colour, va="center", weight="bold")
        axes.set_xlabel("update")
        axes.set_ylabel("mean score of the stories")
        axes.set_ylim(-0.55, 1.2)
        axes.set_xlim(1, 1.22 * len(mean))
        axes.set_xticks(range(5, len(mean) + 1, 5))
        figure.savefig(HERE / f"{name}.png", dpi=90)
        plt.close(figure)


def draw_answer(name: str) -> None:
    """Draw README's figure of all situations on a smaller sheet, so that its letters fill more of a slide.

    The caption is left out: the teacher says it.
    """
    figure = answer_figure()[0].figure
    (caption,) = [text for text in figure.texts if text.get_gid() == "caption"]
    caption.remove()
    figure.set_size_inches(6.0, 3.1)
    figure.savefig(HERE / f"{name}.png", dpi=190)
    plt.close(figure)


if __name__ == "__main__":
    two = {"PPO": ("PPO", "L128 first E0", 0.0), "MA-PPO": ("MA-PPO", "L128 first E4", 0.09)}
    draw_curves("failure", two)
    draw_curves("failure_and_larger_lambda", two | {"PPO-0.99": ("E1", "L128 first E1", -0.09)})
    draw_answer("what_was_found")
