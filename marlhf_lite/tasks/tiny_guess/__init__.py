"""The embedded task in turns: find a hidden number from 1 to 16; each guess is answered higher or lower."""
