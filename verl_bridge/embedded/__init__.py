"""The embedded world: real facts, a corpus, questions and a small policy, all made from a seed with no network."""
