"""What a run can do without, loaded only when an option asks for it. It imports the method, never the other way.

judges      win rates by a model, an endpoint or a person (§4.1)
programs    tasks with unit tests, both sandboxes, and the reward of Appendix B.5
parsers     link-grammar and stanza for English, tree-sitter for Python
vllm        rollouts by vLLM's servers
memory      whether a run fits a card, and how many cards are the least
baselines   DPO, RLOO and GRPO (Table 7)
"""
