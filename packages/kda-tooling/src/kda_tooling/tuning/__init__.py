"""`kda tune`: from timed verifies to a gate table."""
