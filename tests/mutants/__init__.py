"""Deliberate breaks of the kernels, and the test that must notice each."""
