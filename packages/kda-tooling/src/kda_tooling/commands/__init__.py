"""One module per `kda` command: options, progress and output; the work is done in the modules beside this package."""
