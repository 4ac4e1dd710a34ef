"""Your own reward. With this file in the current folder: marlhf run --reward my_reward:short"""


def short(prompts, responses):
    """Return one number per response, higher is better; here, fewer words."""
    return [-len(response.split()) / 50 for response in responses]
