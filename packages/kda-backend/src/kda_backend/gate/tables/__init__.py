"""The packaged tables, one JSON file per device, head shape and activation dtype, each written by `kda tune`."""
