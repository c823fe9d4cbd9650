"""Acting on the score: retrieval, the controller, and the Torch-JAX bridge."""
