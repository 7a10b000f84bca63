"""The Keras front end: a model trained on clients, with callbacks."""

from tfdp_fl.keras.make_private import make_private
from tfdp_fl.keras.model import DPFederatedModel
from tfdp_fl.keras.private_metrics import PrivateMetrics
from tfdp_fl.keras.run import Run
from tfdp_fl.keras.training_setup import validate

__all__ = ["DPFederatedModel", "PrivateMetrics", "Run", "make_private", "validate"]
