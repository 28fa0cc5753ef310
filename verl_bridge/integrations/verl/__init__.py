"""verl as the host."""
