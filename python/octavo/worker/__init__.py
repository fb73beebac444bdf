"""The owner of a device: slot state, the model, the sampler. Knows plans, not requests."""
