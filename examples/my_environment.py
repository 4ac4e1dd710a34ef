"""Your own environment: it asks for a word, and answers with the right letters.

marlhf ppo --environment my_environment:Word --termination turn --sft runs/a --dataset prompts.jsonl"""


class Word:
    """The prompt's last word in "quotation marks" is the secret; a turn earns the share of its letters that are new."""

    def reset(self, prompts):
        states = []
        for prompt in prompts:
            secret = prompt.split('"')[-2]  # between the last two quotation marks
            states.append({"secret": set(secret.lower()), "named": set()})
        return states

    def step(self, states, texts):
        observations = []
        rewards = []
        dones = []
        for state, text in zip(states, texts, strict=True):
            right = set(text.lower()) & state["secret"]
            new = right - state["named"]
            state["named"] |= new
            letters = " ".join(sorted(state["named"])) or "nothing"
            observations.append(f" Right: {letters}.")
            rewards.append(len(new) / len(state["secret"]))
            dones.append(state["named"] == state["secret"])
        return observations, rewards, dones
