"""SFT, reward model and PPO."""
