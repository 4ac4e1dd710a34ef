"""Optional parts, loaded only when an option asks for them. They import the method; the method never imports them.

judges      win rates by a model, an endpoint or a person (§4.1)
programs    tasks with unit tests, two sandboxes, and the reward of Appendix B.5
parsers     tree-sitter for Python
vllm        vLLM's servers as `--sampler vllm`
memory      whether a run fits a card, or each of several
baselines   DPO, RLOO and GRPO (Table 7)
"""
