"""The demo: a small real model, its training, and decoding with and without speculation."""
