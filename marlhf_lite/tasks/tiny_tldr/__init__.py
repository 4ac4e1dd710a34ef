"""The embedded summarisation task: posts, summaries and their true score."""
