"""Benchmarks and evaluation. Imports nothing heavy."""
