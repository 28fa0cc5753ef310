"""Question answering: matching answers, reading actions, scoring rollouts. Pure Python: no torch, no host."""
