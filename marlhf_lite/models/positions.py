"""How long a text may be for the positions of a base model."""

from transformers import PreTrainedModel


def position_limit(base: PreTrainedModel) -> int | None:
    """Return how many tokens a text may have for the positions of a base; None if there is no limit.

    A base with learned positions takes as many tokens as it has positions, and RoPE any number: see the exceptions in
    `shared_rope_limit`.
    """
    config = base.config.get_text_config()
    if getattr(config, "rope_parameters", None):  # it has RoPE
        return shared_rope_limit(base)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def shared_rope_limit(base: PreTrainedModel) -> int | None:
    """Return the length in tokens up to which LongRoPE and dynamic RoPE rotate all texts alike; None for other models.

    If the longest text of a batch is longer, it sets the angles of all texts. Then a text's log-probabilities depend on
    the texts beside it, and PPO's ratio differs from 1 before any step.
    """
    config = base.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # A config has one dict of settings for all layers, or a dict of such dicts by kind of layer. In the first case the
    # values are no dicts, in the second the outer dict has no `rope_type`, so both can be looked through.
    limits = []
    for settings in (rope, *rope.values()):
        if not isinstance(settings, dict):
            continue
        kind = settings.get("rope_type", "")
        if kind == "longrope":
            limits.append(settings["original_max_position_embeddings"])
        if "dynamic" in kind:
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)
