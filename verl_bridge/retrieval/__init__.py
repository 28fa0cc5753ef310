"""The learning retriever: corpus, encoders, index, search and the actor that serves them. Imports nothing heavy."""
