"""The mathematics of GCA and BRIDGE: tensors in, tensors out, nothing but torch imported."""
