"""Fixed, public features: Keras layers with nothing to learn."""

from tfdp_fl.features.oriented_gradients import OrientedGradients

__all__ = ["OrientedGradients"]
