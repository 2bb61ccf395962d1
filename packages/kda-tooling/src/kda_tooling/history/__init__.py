"""The performance history: asv's result files read, judged cell by cell, and carried to the dispatch gate's tables."""
