"""The engine's loop: plans from the Rust core, results back to it. Knows neither requests nor tensors."""
