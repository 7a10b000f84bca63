"""Command-line programs, installed as the package `tfdp_fl_scripts`."""
