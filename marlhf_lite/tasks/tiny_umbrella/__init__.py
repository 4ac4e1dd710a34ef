"""The embedded task in which one word decides the score: take or leave the umbrella, somewhere in a story."""
