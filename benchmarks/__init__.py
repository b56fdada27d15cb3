"""Claims of speed, each measured together with what it is compared to."""
