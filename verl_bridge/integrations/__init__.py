"""Hosts: the only place where verl and verl-tool are imported."""
