"""Holdfast for trainers that people have: the framework's own methods are called, only the loop over steps is ours."""
