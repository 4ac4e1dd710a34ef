"""Options of the command line, where they come from, and the presets."""
