"""What server and client wrappers tell each other, under Flower's names."""

CLIP_NORM = "dpfedavg_clip_norm"
"""Config: S, the clip norm of this round (float)."""

NOISE_STDDEV = "dpfedavg_noise_stddev"
"""Config: what the client adds to each coordinate (float); absent if none."""

ADAPTIVE_CLIP_ENABLED = "dpfedavg_adaptive_clip_enabled"
"""Config: whether the client is to return its norm bit (bool)."""

NORM_BIT = "dpfedavg_norm_bit"
"""Metric: whether the update's norm was at most S (bool)."""

WEIGHT_KEY = "dpfedavg_weight_key"
"""Config, message API: the metric that the strategy takes for a weight (str);
`num-examples` if it does not say."""
