"""The embedded task in turns: find a hidden number from 1 to 16 by guesses that are answered higher or lower."""
