"""The embedded dialogue task: two turns, and an answer that has to give what was asked for, without harm."""
