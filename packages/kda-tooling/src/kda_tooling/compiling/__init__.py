"""Compiling every kernel ahead of time: what is compiled, its figures, rules and budget."""
