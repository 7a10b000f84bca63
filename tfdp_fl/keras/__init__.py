"""The Keras front: a model trained on clients, with callbacks."""

from tfdp_fl.keras.make_private import make_private
from tfdp_fl.keras.model import DPFederatedModel

__all__ = ["DPFederatedModel", "make_private"]
