"""What the tests share: problem builders, an independent oracle, error bounds, bit comparison."""
