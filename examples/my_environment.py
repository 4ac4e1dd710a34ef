"""Your own environment: it asks for a word, and answers with the right letters.

marlhf ppo --environment my_environment:Word --termination turn --sft runs/a --dataset prompts.jsonl"""


class Word:
    """The prompt's last word in "quotation marks" is the secret; a turn earns the share of its letters that are new."""

    def reset(self, prompts):
        return [
            {"secret": set(prompt.split('"')[-2].lower()), "named": set()} for prompt in prompts
        ]

    def step(self, states, texts):
        observations, rewards, dones = [], [], []
        for state, text in zip(states, texts, strict=True):
            new = (set(text.lower()) & state["secret"]) - state["named"]
            state["named"] |= new
            observations.append(f" Right: {' '.join(sorted(state['named'])) or 'nothing'}.")
            rewards.append(len(new) / len(state["secret"]))
            dones.append(state["named"] == state["secret"])
        return observations, rewards, dones
