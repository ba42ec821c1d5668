"""Whether two answers are the same mathematics."""
