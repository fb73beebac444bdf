"""Is octavo right about a model on this machine? Its ids, log-probabilities and perplexity against transformers'.

Goes through the public API only, as a user does; imports torch and transformers when a model is compared, not before.
"""
