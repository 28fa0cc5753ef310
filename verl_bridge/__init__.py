"""verl_bridge: a learning retriever (BRIDGE) and grounded credit assignment (GCA) for verl search agents."""

__version__ = "0.1.0"
