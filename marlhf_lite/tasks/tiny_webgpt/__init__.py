"""The embedded question task: a few numbered sources, and an answer whose statements have to cite them rightly."""
