"""Pairwise judges and their judgments (§4.1, Appendix F, Table 1)."""
