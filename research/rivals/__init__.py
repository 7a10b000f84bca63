"""Other frameworks at the benchmark's work, each in an environment of its own.

Programs that import neither TensorFlow nor tfdp_fl. Each takes the work as
JSON, runs rounds, and prints their seconds as JSON (`work`).
"""
