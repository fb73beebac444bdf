"""octavo: an LLM inference engine with a Rust control plane and a Python data plane."""
