"""What `kda gate` shows of tables and decisions."""
