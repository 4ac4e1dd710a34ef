"""What MA-PPO is compared with: DPO, RLOO and GRPO (Table 7)."""
