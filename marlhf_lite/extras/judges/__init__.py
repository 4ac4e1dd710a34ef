"""Pairwise judges and what they said (§4.1, Appendix F, Table 1)."""
