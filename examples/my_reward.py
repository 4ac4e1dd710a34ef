"""A reward of your own. With this file in the current folder: marlhf run --reward my_reward:short"""


def short(prompts, responses):
    """One number a response; higher is better: here, fewer words."""
    return [-len(response.split()) / 50 for response in responses]
