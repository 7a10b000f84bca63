"""TensorFlow Federated: aggregation factories and learning processes.

Users import it as `tfdp_fl.aggregators` and `tfdp_fl.learning`.
"""
