"""Times the engine side by side with TFF; what `make benchmark` is made of."""
