"""Command-line tools of the KDA verify kernels (command ``kda``)."""

__version__ = "0.1.0"
