"""Measuring verify and commit: arms, byte floors, interleaved graph timing, the sweep and its table and picture."""
