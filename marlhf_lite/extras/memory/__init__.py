"""The memory that SFT, reward model and PPO need on a card."""
