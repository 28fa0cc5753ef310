"""BRIDGE's lower level: which sequences the policy scores, and the retriever's optimiser. Imports nothing heavy."""
