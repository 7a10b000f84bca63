"""tfdp_fl"""
