"""``python -m kda_tooling`` is the ``kda`` command."""

from kda_tooling.cli import app

if __name__ == "__main__":
    app()
