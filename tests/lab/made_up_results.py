"""Result files of studies, made up."""


def made_up(method, seed, scores, curve=(), prompts="p"):
    final = {
        "prompts": prompts,
        "rm_score": list(scores),
        "gold": [s / 2 for s in scores],
        "tokens": [5.0] * len(scores),
    }
    rows = [
        {"update": u, "score_mean": s, "gold_mean": s, "generated_tokens": 10 * u, "seconds": 2.0}
        for u, s in enumerate(curve, 1)
    ]
    return {"method": method, "seed": seed, "final": final, "curve": rows}
